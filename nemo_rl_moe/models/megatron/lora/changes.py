# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensors that merged adapters change. An engine that has received all weights once needs only these tensors."""

import re
from collections.abc import Callable, Sequence

from torch import nn

from nemo_rl_moe.models.megatron.lora.adapter import adapters_in

_BLOCK = re.compile(r"^(.*?\.\d+\.[^.]+)\.")


def block_of(name: str) -> str:
    """Return the name of a tensor's block: its layer's attention, MLP or norm.

    A tensor outside of layers is a separate block, with the tensor's name.

    Engines join tensors of a block in one parameter, such as queries with keys or a layer's experts, and load them
    together.
    """
    found = _BLOCK.match(name)
    return name if found is None else found[1]


def changed_by_adapters(chunks: Sequence[nn.Module]) -> Callable[[str], bool]:
    """Return a function of a Hugging Face tensor name: whether this pipeline stage adapts the tensor's block.

    The block of a tensor is its layer's attention, MLP or norm (see `block_of`).
    """
    modules = [module for adapter in adapters_in(chunks) for module in adapter.base.modules if module is not None]
    blocks = {block_of(f"{module}.weight") for module in modules}
    return lambda name: block_of(name) in blocks
