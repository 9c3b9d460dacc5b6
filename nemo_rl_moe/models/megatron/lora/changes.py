# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensors that adapters change when they are merged: an engine that has had all weights once needs these alone."""

import re
from collections.abc import Callable, Sequence

from torch import nn

from nemo_rl_moe.models.megatron.lora.adapter import adapters_in

_BLOCK = re.compile(r"^(.*?\.\d+\.[^.]+)\.")


def block_of(name: str) -> str:
    """Return the part of the model that a tensor belongs to: a layer's attention, MLP or norm, or the tensor itself.

    Engines join tensors of a block in one parameter, such as queries with keys, or a layer's experts, and load it as a
    whole.
    """
    found = _BLOCK.match(name)
    return name if found is None else found[1]


def changed_by_adapters(chunks: Sequence[nn.Module]) -> Callable[[str], bool]:
    """Return whether a tensor of this pipeline stage, by its Hugging Face name, is in a block with an adapter."""
    modules = [module for adapter in adapters_in(chunks) for module in adapter.base.modules if module is not None]
    blocks = {block_of(f"{module}.weight") for module in modules}
    return lambda name: block_of(name) in blocks
