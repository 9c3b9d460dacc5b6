# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention along a prefix tree with Transformer Engine: one call of its kernel for packed sequences."""

from enum import Enum
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from nemo_rl_moe.models.megatron.training.prefix_tree import TreeSeqParams


class _BottomRight(Enum):
    """Mask type of Transformer Engine that Megatron-Core's `AttnMaskType` lacks. Megatron-Core passes its name on."""

    padding_causal_bottom_right = 1


def attend_along_trees(chunk: GPTModel) -> None:
    """Let the attention of all layers follow the prefix tree of a microbatch that has one.

    A node's queries attend to the keys of its path and to their own, with the causal mask aligned to the last key.
    """
    for layer in chunk.decoder.layers:
        layer.self_attention.core_attention.register_forward_pre_hook(_with_path_keys, with_kwargs=True)


def _with_path_keys(
    attention: MegatronModule, tensors: tuple[Tensor, Tensor, Tensor, Any], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Replace keys, values, bounds and mask type of a call, if its sequences share prefixes."""
    packed = options.get("packed_seq_params")
    if not isinstance(packed, TreeSeqParams):
        return None
    query, key, value, *others = tensors
    tokens, of_nodes = packed.path_keys
    changed = {"packed_seq_params": of_nodes, "attn_mask_type": _BottomRight.padding_causal_bottom_right}
    return (query, key.index_select(0, tokens), value.index_select(0, tokens), *others), options | changed
