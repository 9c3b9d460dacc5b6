# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine in plain torch, for tests on machines without a GPU: same names, parameters, marks and refusals.

What Megatron-Core's layer spec for Transformer Engine uses is here, written from the public interface of its release
2.14; nothing of 8-bit formats, and no kernels. Two things it has in common with the real one are what it is for: the
names under which modules keep their weights, and the marks of tensor parallelism on them, which sit on every linear
layer's weight, also on one that each rank holds whole.
"""

from transformer_engine import pytorch
from transformer_engine.common import recipe

__version__ = "2.14.0"
__all__ = ["pytorch", "recipe"]
