# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters in a checkpoint: the factors with peft's names, as pieces of full tensors in any layout, and the value head
that trains with them."""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt import GPTModel
from torch import nn

from nemo_rl_moe.models.megatron.layers.recurrent_mixer import in_sections
from nemo_rl_moe.models.megatron.lora.adapter import Factor, adapters_in
from nemo_rl_moe.models.megatron.model.value_head import PREFIX as VALUE_HEAD_PREFIX

PREFIX = "base_model.model."
"""Prefix of every name in peft's files."""


def sharded_adapters(chunks: Sequence[nn.Module]) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    """Return name in a checkpoint -> this process's shard of an adapter's factor. Empty without adapters.

    The factors of a layer's experts are one tensor `[experts, rows, columns]`. Its name contains no expert's number.
    """
    found = (_sharded(factor) for adapter in adapters_in(chunks) for factor in adapter.factors())
    return {sharded.key: sharded for sharded in found}


def sharded_value_head(chunks: Sequence[GPTModel]) -> dict[str, ShardedTensor]:
    """Return name in a checkpoint -> the value head's weight, which each rank of the last stage holds. Empty without a
    value head."""
    copies = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
    return {
        f"{VALUE_HEAD_PREFIX}{name}": ShardedTensor.from_rank_offsets(
            f"{VALUE_HEAD_PREFIX}{name}", parameter, replica_id=(0, *copies)
        )
        for chunk in chunks
        if chunk.has_value_head
        for name, parameter in chunk.value_head.named_parameters()
    }


def _sharded(factor: Factor) -> ShardedTensor | ShardedTensorFactory:
    found = ShardedTensor.from_rank_offsets(
        f"{PREFIX}{factor.name.replace('.{expert}', '')}.weight",
        factor.parameter,
        *_offsets(factor),
        replica_id=_replica(factor),
    )
    return in_sections(found, factor.sections, int(factor.is_stacked)) if len(factor.sections) > 1 else found


def _offsets(factor: Factor) -> Iterator[tuple[int, int, int]]:
    base = factor.base
    if factor.is_stacked:
        size = parallel_state.get_expert_model_parallel_world_size()
        yield 0, parallel_state.get_expert_model_parallel_rank(), size
    if factor.cut is not None:
        yield factor.cut + factor.parameter.dim() - 2, base.shard_rank, base.num_shards


def _replica(factor: Factor) -> Any:
    """Return the replica indices of this process's shard in the pipeline, tensor and data dimensions."""
    if factor.is_stacked:
        same = factor.cut is None and factor.base.num_shards > 1
        copy = parallel_state.get_expert_tensor_parallel_rank() if same else 0
        return 0, copy, parallel_state.get_expert_data_parallel_rank()
    copy = 0 if factor.cut is not None else parallel_state.get_tensor_model_parallel_rank()
    return 0, copy, parallel_state.get_data_parallel_rank(with_context_parallel=True)
