# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensors of 8-bit formats: a class that nothing is an instance of."""

from torch import Tensor


class QuantizedTensor(Tensor):
    """Never made."""
