# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Layouts of parameters with sections of rows: attention with an output gate, gated delta nets, Mamba-2."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_rl_moe.models.families.rules import heads_of


@dataclass(frozen=True)
class GatedQueryGroups:
    """Layout of attention with output gates: for each query group its queries, the queries' gates, its key, its value.

    In Hugging Face's query tensor, the gate of each head follows the head's query.
    """

    def join(self, parts: Sequence[Tensor], hf_config: Any) -> Tensor:
        _, head_dim = heads_of(hf_config)
        groups = parts[1].shape[0] // head_dim
        queries, keys, values = (part.reshape(groups, -1, head_dim, *part.shape[1:]) for part in parts)
        return torch.cat([queries[:, 0::2], queries[:, 1::2], keys, values], dim=1).flatten(0, 2)

    def split(self, parameter: Tensor, num_parts: int, hf_config: Any) -> Sequence[Tensor]:
        heads_per_group, head_dim = heads_of(hf_config)
        grouped = parameter.reshape(-1, 2 * heads_per_group + 2, head_dim, *parameter.shape[1:])
        queries, gates, keys, values = grouped.split([heads_per_group, heads_per_group, 1, 1], dim=1)
        with_gates = torch.stack([queries, gates], dim=2).flatten(1, 2)
        return [part.flatten(0, 2) for part in (with_gates, keys, values)]


def _projected_rows(hf_config: Any) -> list[int]:
    """Return numbers of rows of a delta net's input projection: queries, keys, values, gates, rates and decays."""
    keys = hf_config.linear_num_key_heads * hf_config.linear_key_head_dim
    values = hf_config.linear_num_value_heads * hf_config.linear_value_head_dim
    return [keys, keys, values, values, hf_config.linear_num_value_heads, hf_config.linear_num_value_heads]


@dataclass(frozen=True)
class SectionRows:
    """Concatenated sections of rows, of different sizes.

    Attributes:
        sizes: Function of the configuration that returns the number of rows of each section.
    """

    sizes: Callable[[Any], Sequence[int]]

    def join(self, parts: Sequence[Tensor], hf_config: Any) -> Tensor:
        return torch.cat(list(parts))

    def split(self, parameter: Tensor, num_parts: int, hf_config: Any) -> Sequence[Tensor]:
        rows = self.sizes(hf_config)[:num_parts]
        return parameter.split([size * len(parameter) // sum(rows) for size in rows])


DELTA_NET_ROWS = SectionRows(_projected_rows)
"""Layout of a gated delta net's input projection. Its convolution has only queries, keys and values."""


@dataclass(frozen=True)
class KeyHeadRows:
    """Layout of Qwen3-Next's two input projections. For each key head, the first has query, key, values and gates, and
    the second has rates and decays."""

    def join(self, parts: Sequence[Tensor], hf_config: Any) -> Tensor:
        of_heads, sizes = _by_key_head(hf_config)
        heads = parts[0].shape[0] // of_heads[0]
        grouped = [part.unflatten(0, (heads, -1)) for part in parts]
        sections = [*grouped[0].split(sizes[:4], dim=1), *grouped[1].split(sizes[4:], dim=1)]
        return torch.cat([section.flatten(0, 1) for section in sections])

    def split(self, parameter: Tensor, num_parts: int, hf_config: Any) -> Sequence[Tensor]:
        of_heads, sizes = _by_key_head(hf_config)
        heads = len(parameter) // sum(of_heads)
        sections = [section.unflatten(0, (heads, -1)) for section in parameter.split([heads * size for size in sizes])]
        return [torch.cat(some, dim=1).flatten(0, 1) for some in (sections[:4], sections[4:])]


def _by_key_head(hf_config: Any) -> tuple[tuple[int, int], list[int]]:
    """Return the number of rows per key head in each of Qwen3-Next's two projections, and in each section of them."""
    sizes = [rows // hf_config.linear_num_key_heads for rows in _projected_rows(hf_config)]
    return (sum(sizes[:4]), sum(sizes[4:])), sizes
