# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapter of one linear layer on tensor-parallel ranks (Hu et al. 2021, LoRA).

Each Hugging Face tensor in the layer's weight can have a pair of factors, `lora_A` `[rank, inputs]` and `lora_B`
`[outputs, rank]`. If the layer is sharded by outputs, `A` is replicated and `B` is sharded like the weight. If it is
sharded by inputs, `A` is sharded and `B` is replicated. A replicated factor may see only this rank's part of the
sequence, or of an expert's width. Then it is marked, so that Megatron-Core sums its gradient over the tensor-parallel
ranks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from nemo_rl_moe.config.schema_lora import LoraConfig
from nemo_rl_moe.models.families.rules import TensorLayout
from nemo_rl_moe.models.megatron.cpu.moe import ExpertProducts
from nemo_rl_moe.models.megatron.lora.grouped_products import grouped_product
from nemo_rl_moe.models.megatron.model.parallel_state import OF_RANK, OF_SHARE

OUTPUTS, INPUTS = 0, 1
"""Dimension in which a weight is sharded."""


class Switch:
    """Switch that turns all adapters of a model on or off."""

    def __init__(self) -> None:
        self.is_on = True

    @contextmanager
    def off(self) -> Iterator[None]:
        """Turn the adapters off while the context is open, to compute with the base model."""
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before


@dataclass(frozen=True)
class Base:
    """A frozen linear layer of this rank, or one linear layer of each of the rank's experts.

    Attributes:
        weights: One matrix `[outputs, inputs]`. For experts, one matrix for each expert, or one tensor with all of
            them.
        shape: Number of outputs and of inputs of a matrix on this rank.
        modules: Hugging Face names of the modules in the weight, in order, with `{expert}` in place of an expert's
            number. None for a module without an adapter. A module has its name once for each section of its outputs.
        names: The modules' names within their layer, such as q_proj. None for a module without an adapter.
        layout: Order of the modules' outputs in the weight.
        cut: Dimension in which the weight is sharded, OUTPUTS or INPUTS. None if it is replicated.
        num_shards: Number of ranks with a shard.
        shard_rank: Index of this rank's shard.
        experts: For routed experts, the index of this rank's first expert, the number of its experts, and the number of
            all experts. Otherwise None.
        config: Megatron-Core's configuration. Each pass reads it again, because generation switches sequence
            parallelism off in it.
    """

    weights: tuple[Tensor, ...]
    shape: tuple[int, int]
    modules: tuple[str | None, ...]
    names: tuple[str | None, ...]
    layout: TensorLayout
    cut: int | None
    num_shards: int
    shard_rank: int
    experts: tuple[int, int, int] | None
    config: TransformerConfig

    @property
    def sequence_is_cut(self) -> bool:
        return bool(self.config.sequence_parallel)


@dataclass(frozen=True)
class Factor:
    """One factor of this rank, as a piece of a full tensor.

    Attributes:
        name: Name of the full tensor in `peft`, without `peft`'s prefix, with `{expert}` in place of an expert's
            number.
        parameter: `[rows, columns]`, or `[experts, rows, columns]` if each expert has a factor.
        cut: Dimension in which the matrix is sharded. None if it is replicated.
        sections: Number of this rank's rows or columns in each section of a sharded matrix. Ranks share every section.
    """

    name: str
    parameter: nn.Parameter
    cut: int | None
    base: Base
    sections: tuple[int, ...]

    @property
    def is_stacked(self) -> bool:
        """Whether the factor has a matrix for each expert."""
        return self.parameter.dim() == 3


class Pair(nn.Module):
    """The two factors of one Hugging Face tensor."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter

    def __init__(self, lora_A: Tensor, lora_B: Tensor):
        super().__init__()
        self.lora_A, self.lora_B = nn.Parameter(lora_A), nn.Parameter(lora_B)


class Adapter(nn.Module):
    """The factors of one linear layer. Their initial values are zeros.

    Args:
        hf_config: Configuration that determines the order of queries, keys and values.
        switch: Switch that turns all adapters of the model on or off.
    """

    def __init__(self, base: Base, hf_config: object, settings: LoraConfig, switch: Switch, dtype: torch.dtype):
        super().__init__()
        self.base, self.switch, self.scale = base, switch, settings.scale
        self._hf_config, self._dropout = hf_config, settings.dropout
        self.is_per_expert = base.experts is not None and settings.experts == "per_expert"
        outputs, inputs = base.shape
        of_sources = base.layout.split(torch.empty(outputs, 1, device="meta"), len(base.modules), hf_config)
        self._outputs = [len(part) for part in of_sources]
        first = (base.experts[1],) if self.is_per_expert and base.experts is not None else ()
        device = base.weights[0].device
        self._adapted: dict[str, list[int]] = {}
        for index, module in enumerate(base.modules):
            if module is not None:
                self._adapted.setdefault(module, []).append(index)
        self.pairs = nn.ModuleDict()
        for sources in self._adapted.values():
            lora_a = torch.zeros(*first, settings.rank, inputs, dtype=dtype, device=device)
            lora_b = torch.zeros(*first, sum(self._rows(sources)), settings.rank, dtype=dtype, device=device)
            self.pairs[str(base.names[sources[0]])] = Pair(lora_a, lora_b)
        for factor in self.factors():
            self._mark(factor)

    def factors(self) -> Iterator[Factor]:
        """Yield both factors of every tensor."""
        for (module, sources), pair in zip(self._adapted.items(), self._pairs, strict=True):
            for name, parameter, replicated in (("lora_A", pair.lora_A, OUTPUTS), ("lora_B", pair.lora_B, INPUTS)):
                cut = None if self.base.cut in (None, replicated) or self.base.num_shards == 1 else self.base.cut
                sections = self._rows(sources) if name == "lora_B" else (self.base.shape[1],)
                yield Factor(f"{module}.{name}", parameter, cut, self.base, sections)

    def _rows(self, sources: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._outputs[index] for index in sources)

    @property
    def _pairs(self) -> list[Pair]:
        return [pair for pair in self.pairs.values() if isinstance(pair, Pair)]  # narrows the type

    def _mark(self, factor: Factor) -> None:
        """Mark how ranks share a factor, for Megatron-Core's reduction and norm of gradients."""
        base, parameter = self.base, factor.parameter
        if factor.cut is not None:
            set_tensor_model_parallel_attributes(parameter, True, factor.cut + parameter.dim() - 2, 1)
        elif self.is_per_expert and base.num_shards == 1:
            # Tensor-parallel ranks have different experts.
            set_tensor_model_parallel_attributes(parameter, True, 1, 1)
        # A replicated factor sees only a part of the tokens, or of an expert's width.
        is_summed = factor.cut is None and (not self.is_per_expert or base.num_shards > 1) and base.sequence_is_cut
        parameter.sequence_parallel = is_summed  # type: ignore[attr-defined]
        if self.is_per_expert:
            parameter.allreduce = False  # type: ignore[attr-defined]

    def down(self) -> Tensor:
        """Return the `A` of all `n` pairs concatenated: `[n * rank, inputs]` or `[experts, n * rank, inputs]`."""
        parts: list[Tensor] = [pair.lora_A for pair in self._pairs]
        return torch.cat(parts, -2) if len(parts) > 1 else parts[0]  # without a copy

    def up(self) -> Tensor:
        """Return the `B` of all `n` pairs joined in the order of the weight's rows.

        The shape is `[outputs, n * rank]`, or `[experts, outputs, n * rank]` if each expert has factors.
        """
        pairs = self._pairs
        first = pairs[0].lora_B
        rank, count = first.shape[-1], len(pairs)
        parts = [first.new_zeros(*first.shape[:-2], length, count * rank) for length in self._outputs]
        for number, (sources, pair) in enumerate(zip(self._adapted.values(), pairs, strict=True)):
            padded = F.pad(pair.lora_B, (number * rank, (count - 1 - number) * rank))
            for index, part in zip(sources, padded.split(self._rows(sources), -2), strict=True):
                parts[index] = part
        if not self.is_per_expert:
            return self.base.layout.join(parts, self._hf_config)
        # The layout joins along the first dimension. Grouped products need contiguous matrices.
        joined = self.base.layout.join([part.movedim(0, -1) for part in parts], self._hf_config)
        return joined.movedim(-1, 0).contiguous()

    @torch.no_grad()
    def delta(self, expert: int = 0) -> Tensor:
        """Return the product `scale * B @ A` in float32, `[outputs, inputs]`. Merging adds it to the weight.

        Args:
            expert: Index of one of this rank's experts. Only used if each expert has factors of its own.
        """
        up, down = self.up().float(), self.down().float()
        if self.is_per_expert:
            up, down = up[expert], down[expert]
        return self.scale * (up @ down)

    def of_linear(self, inputs: Tensor) -> Tensor:
        """Return the adapter's term of the layer's output, `[..., outputs]`, for inputs `[..., inputs]`."""
        hidden = F.linear(self._dropped(inputs), self.down())
        if self.base.num_shards > 1 and self.base.experts is None:
            hidden = self._shared(hidden)
        return F.linear(hidden, self.up()) * self.scale

    def _shared(self, hidden: Tensor) -> Tensor:
        """Return the product with `A` after the tensor-parallel collective that the layer's sharding requires."""
        if self.base.cut == OUTPUTS:
            if self.base.sequence_is_cut:
                return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
            return copy_to_tensor_model_parallel_region(hidden)
        if self.base.cut == INPUTS:
            if self.base.sequence_is_cut:
                return reduce_scatter_to_sequence_parallel_region(hidden)
            return reduce_from_tensor_model_parallel_region(hidden)
        return hidden

    def of_router(self, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the adapter's term of a router's logits, `[..., experts]`, in the number format of the logits."""
        hidden = F.linear(self._dropped(inputs).to(dtype), self.down().to(dtype))
        return F.linear(hidden, self.up().to(dtype)) * self.scale

    def of_expert(self, inputs: Tensor, expert: int) -> Tensor:
        """Return the adapter's term of the output of one of this rank's experts."""
        if not self.is_per_expert:
            return self.of_linear(inputs)
        inputs = self._dropped(inputs)
        return F.linear(F.linear(inputs, self.down()[expert]), self.up()[expert]) * self.scale

    def of_experts(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return the adapter's term of the outputs of all of this rank's experts.

        Args:
            rows: `[rows, inputs]`, sorted by expert.
            ends: End of each expert's rows, int32 `[experts]`.
        """
        if not self.is_per_expert:
            return self.of_linear(rows)
        down, up = self.down().transpose(1, 2), self.up().transpose(1, 2)
        products = ExpertProducts(ends, rows, (rows.shape[1], down.shape[2], up.shape[2]))
        hidden = grouped_product(self._dropped(rows), down, products)
        return grouped_product(hidden, up, products) * self.scale

    def _dropped(self, inputs: Tensor) -> Tensor:
        if not self._dropout or not self.training:
            return inputs
        # Ranks with the same inputs must drop the same inputs.
        base = self.base
        has_own_inputs = base.experts is not None or base.cut == INPUTS or base.sequence_is_cut
        with get_cuda_rng_tracker().fork(OF_RANK if has_own_inputs else OF_SHARE):
            return F.dropout(inputs, self._dropout)


def adapters_in(chunks: Sequence[nn.Module]) -> list[Adapter]:
    """Return the adapters of a model's chunks in the order of their layers."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, Adapter)]
