# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters as a stream of full factors with peft's names, for engines and peft folders."""

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
    """This rank's part of one full factor, `[rows, columns]`.

    Attributes:
        name: Name in peft, with an expert's number unless the layer's experts share the factor.
        local: A view of the parameter.
    """

    name: str
    local: Tensor
    factor: Factor

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the full factor."""
        rows, columns = self.local.shape
        times = self.factor.base.num_shards
        cut = self.factor.cut
        return (rows * times if cut == 0 else rows), (columns * times if cut == 1 else columns)

    def slice_of(self, full: Tensor) -> Tensor:
        """Return this rank's part of the full factor."""
        factor, base = self.factor, self.factor.base
        if factor.cut is None:
            return full
        sections = full.split([size * base.num_shards for size in factor.sections], factor.cut)
        return torch.cat(
            [section.chunk(base.num_shards, factor.cut)[base.shard_rank] for section in sections], factor.cut
        )


def factor_parts(chunks: Sequence[nn.Module]) -> Iterator[FactorPart]:
    """Yield this rank's part of each adapter factor, in the same order on all ranks of a pipeline stage."""
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
    """Yield names and full factors on the host, each on one rank only. Every rank must exhaust the iterator."""
    for part in factor_parts(chunks):
        gathered = _gathered(part)
        if gathered is not None:
            yield part.name, gathered


def factors_with_scale(chunks: Sequence[nn.Module], number_format: str) -> Iterator[NamedTensor]:
    """Yield `factors_of_this_rank` in a number format, `B` multiplied by the adapters' scale.

    Rounded as in engines: first to the format, then the product.
    """
    dtype: torch.dtype = getattr(torch, number_format)
    scale = adapters_in(chunks)[0].scale
    for name, factor in factors_of_this_rank(chunks):
        rounded = factor.to(dtype)
        yield name, rounded * scale if ".lora_B." in name else rounded


def _gathered(part: FactorPart) -> Tensor | None:
    """Return the full factor on the first rank of the first replica, and None on other ranks."""
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
    if not is_first_copy or group.rank() != 0:
        return None
    sections = zip(*(shard.split(factor.sections, factor.cut) for shard in shards), strict=True)
    return torch.cat([part for section in sections for part in section], factor.cut).cpu()


@torch.no_grad()
def load_factors(chunks: Sequence[nn.Module], tensors: Iterable[NamedTensor]) -> None:
    """Fill every factor of this rank from full factors.

    Args:
        tensors: Each name once, in any order. A tensor is valid until the next tensor arrives.

    Raises:
        WeightSyncError: A factor is missing, repeated, unknown or has another shape. The adapters then hold a mixture
            of old and new values.
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
