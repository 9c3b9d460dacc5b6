# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Which Hugging Face tensors each Megatron-Core parameter is made of, as a table.

Canonical parameter names are Megatron-Core's own with two changes, so that they do not depend on the layout or on the
modules in use: layer and expert numbers are global; an expert's weight is `mlp.experts.{expert}.linear_fc1.weight`.

Putting a parameter together and cutting it for tensor parallelism can change places: the piece of a rank is put
together from the same piece of each tensor. So no rank ever needs a whole tensor.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Source:
    """A Hugging Face tensor, or a part of one.

    Attributes:
        name: Its name, with `{layer}` and `{expert}` in place of numbers.
        is_stacked: It holds all experts, `[experts, ...]`: the entry of this one is meant.
        is_transposed: A matrix `[inputs, outputs]`, where Megatron-Core has `[outputs, inputs]`.
        half: 0 or 1: the first or the second half of the rows is meant, after the above; None: all of them.
    """

    name: str
    is_stacked: bool = False
    is_transposed: bool = False
    half: int | None = None


class TensorLayout(Protocol):
    """How a parameter is put together; also for the pieces that a tensor-parallel rank has of all of them."""

    def join(self, parts: Sequence[Tensor], hf_config: Any) -> Tensor:
        """The parameter."""
        ...

    def split(self, parameter: Tensor, num_parts: int, hf_config: Any) -> Sequence[Tensor]:
        """The other way round."""
        ...


@dataclass(frozen=True)
class Rows:
    """The parts' rows one after another, as many of each."""

    def join(self, parts: Sequence[Tensor], hf_config: Any) -> Tensor:
        """The parameter."""
        return torch.cat(list(parts)) if len(parts) > 1 else parts[0]

    def split(self, parameter: Tensor, num_parts: int, hf_config: Any) -> Sequence[Tensor]:
        """The parts."""
        return parameter.chunk(num_parts)


@dataclass(frozen=True)
class InterleavedRows:
    """One tensor in which gate and up rows take turns; in the parameter all gate rows come before all up rows."""

    def join(self, parts: Sequence[Tensor], hf_config: Any) -> Tensor:
        """The parameter."""
        return torch.cat([parts[0][0::2], parts[0][1::2]])

    def split(self, parameter: Tensor, num_parts: int, hf_config: Any) -> Sequence[Tensor]:
        """The one part."""
        return (torch.stack(parameter.chunk(2), dim=1).flatten(0, 1),)


@dataclass(frozen=True)
class QueryGroups:
    """Queries, keys and values: for each query group its query heads, then its key head, then its value head."""

    def join(self, parts: Sequence[Tensor], hf_config: Any) -> Tensor:
        """The parameter."""
        heads_per_group, head_dim = _heads(hf_config)
        groups = parts[1].shape[0] // head_dim
        grouped = [part.reshape(groups, -1, head_dim, *part.shape[1:]) for part in parts]
        assert grouped[0].shape[1] == heads_per_group
        return torch.cat(grouped, dim=1).flatten(0, 2)

    def split(self, parameter: Tensor, num_parts: int, hf_config: Any) -> Sequence[Tensor]:
        """The parts."""
        heads_per_group, head_dim = _heads(hf_config)
        grouped = parameter.reshape(-1, heads_per_group + 2, head_dim, *parameter.shape[1:])
        return [part.flatten(0, 2) for part in grouped.split([heads_per_group, 1, 1], dim=1)]


def _heads(hf_config: Any) -> tuple[int, int]:
    """Query heads of a group, and the size of a head."""
    heads = hf_config.num_attention_heads
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads
    return heads // hf_config.num_key_value_heads, head_dim


@dataclass(frozen=True)
class Rule:
    """One kind of parameter.

    Attributes:
        sources: The tensors that it is made of, in this order, under the names that are written.
        layout: How it is put together.
        alternatives: Other forms of the same tensors that are read where the first ones are not there.
        expert: The expert that it belongs to, once it is known.
    """

    sources: tuple[Source, ...]
    layout: TensorLayout = Rows()
    alternatives: tuple[tuple[Source, ...], ...] = ()
    expert: int | None = None


def rule(
    *sources: str | Source, layout: TensorLayout | None = None, alternatives: Sequence[Sequence[Source]] = ()
) -> Rule:
    """A rule; a tensor that is taken as it is can be given by its name."""
    as_sources = tuple(Source(source) if isinstance(source, str) else source for source in sources)
    return Rule(as_sources, Rows() if layout is None else layout, tuple(map(tuple, alternatives)))


class RuleTable:
    """All rules of a family.

    Args:
        rules: Canonical name, with `{layer}` and `{expert}` in place of numbers, to its rule.
    """

    def __init__(self, rules: Mapping[str, Rule]):
        self._rules = [(_as_pattern(name), found) for name, found in rules.items()]

    def find(self, name: str) -> Rule | None:
        """The rule of one parameter, with its numbers filled in; None where there is none."""
        for pattern, found in self._rules:
            if match := pattern.fullmatch(name):
                return _filled_in(found, match.groupdict())
        return None


def _as_pattern(name: str) -> re.Pattern[str]:
    escaped = re.escape(name)
    for number in ("layer", "expert"):
        escaped = escaped.replace(re.escape(f"{{{number}}}"), rf"(?P<{number}>\d+)")
    return re.compile(escaped)


def _filled_in(found: Rule, numbers: Mapping[str, str]) -> Rule:
    def fill(sources: Sequence[Source]) -> tuple[Source, ...]:
        return tuple(replace(source, name=source.name.format(**numbers)) for source in sources)

    return Rule(
        fill(found.sources),
        found.layout,
        tuple(map(fill, found.alternatives)),
        int(numbers["expert"]) if "expert" in numbers else None,
    )
