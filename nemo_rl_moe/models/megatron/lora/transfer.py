# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters as a stream of whole factors under peft's names: to engines that take them, to and from peft's folders."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from nemo_rl_moe.errors import WeightSyncError
from nemo_rl_moe.models.megatron.lora.adapter import Factor, adapters_in
from nemo_rl_moe.models.megatron.lora.checkpoint_names import PREFIX
from nemo_rl_moe.models.safetensors_folder import listed
from nemo_rl_moe.weight_sync.transport import NamedTensor


@dataclass(frozen=True)
class FactorPart:
    """This rank's part of one whole factor: `[rows, columns]`, of an expert its own.

    Attributes:
        name: In peft, with the number of the expert; without one where the layer's experts share it.
        local: A view of the parameter.
    """

    name: str
    local: Tensor
    factor: Factor

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the whole factor."""
        rows, columns = self.local.shape
        times = self.factor.base.num_shards
        cut = self.factor.cut
        return (rows * times if cut == 0 else rows), (columns * times if cut == 1 else columns)

    def slice_of(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the whole factor."""
        if self.factor.cut is None:
            return whole
        return whole.chunk(self.factor.base.num_shards, self.factor.cut)[self.factor.base.shard_rank]


def factor_parts(chunks: Sequence[nn.Module]) -> Iterator[FactorPart]:
    """Yield the parts of this rank, in the same order on all ranks of a pipeline stage."""
    for adapter in adapters_in(chunks):
        for factor in adapter.factors():
            name = f"{PREFIX}{factor.name}.weight"
            if not factor.is_stacked:
                yield FactorPart(name.replace(".{expert}", ""), factor.parameter.data, factor)
                continue
            assert factor.base.experts is not None
            first, count, _ = factor.base.experts
            for index in range(count):
                yield FactorPart(name.format(expert=first + index), factor.parameter.data[index], factor)


def factors_of_this_rank(chunks: Sequence[nn.Module]) -> Iterator[NamedTensor]:
    """Yield names and whole factors on the host, each on one rank; every rank runs it to its end."""
    for part in factor_parts(chunks):
        whole = _whole(part)
        if whole is not None:
            yield part.name, whole


def _whole(part: FactorPart) -> Tensor | None:
    """Return the factor on the first of the ranks that share it and of its copies."""
    factor = part.factor
    if factor.is_stacked:
        is_first_copy = parallel_state.get_expert_data_parallel_rank() == 0
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        is_first_copy = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        group = parallel_state.get_tensor_model_parallel_group()
    if factor.cut is None:
        return part.local.cpu().clone() if is_first_copy and group.rank() == 0 else None
    local = part.local.contiguous()
    shards = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(shards, local, group=group)
    return torch.cat(shards, factor.cut).cpu() if is_first_copy and group.rank() == 0 else None


@torch.no_grad()
def load_factors(chunks: Sequence[nn.Module], tensors: Iterable[NamedTensor]) -> None:
    """Fill every factor of this rank, which holds the whole model.

    Args:
        tensors: Each name once and in any order; one is valid until the next is taken.

    Raises:
        WeightSyncError: A factor is missing, comes twice, has another shape or belongs to no layer; the adapters are a
            mixture then.
    """
    awaited = {part.name: part for part in factor_parts(chunks)}
    arrived: set[str] = set()
    for name, tensor in tensors:
        if name in arrived:
            raise WeightSyncError(f"{name} has arrived twice")
        if name not in awaited:
            raise WeightSyncError(f"{name} belongs to no adapter of the engine's model")
        part = awaited[name]
        if tuple(tensor.shape) != part.shape:
            raise WeightSyncError(f"{name} has the shape {list(tensor.shape)}, expected {list(part.shape)}")
        part.local.copy_(part.slice_of(tensor))
        arrived.add(name)
    if missing := sorted(awaited.keys() - arrived):
        raise WeightSyncError(f"{len(missing)} factors of adapters have not arrived: {listed(missing)}")
