# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A rank's piece is the same, whether it is cut out of the whole parameter or put together from slices of tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_rl_moe.models.families.rules import InterleavedRows, QueryGroups, Rows, Rule, Source, rule
from nemo_rl_moe.models.megatron.weights.hf_sources import SourcePart, source_parts
from nemo_rl_moe.models.megatron.weights.parameter_layout import ParameterPiece
from tests.support.quick_list import examples

EXPERTS, EXPERT = 3, 1


@dataclass(frozen=True)
class Case:
    """A rule, its tensors as they lie in files, and the whole parameter that they make."""

    rule: Rule
    tensors: dict[str, Tensor]
    whole: Tensor
    dimension: int | None
    name: str = "decoder.layers.0.some.weight"
    sections: tuple[int, ...] = (1,)

    def piece(self, num_shards: int, shard_rank: int) -> ParameterPiece:
        """One rank's, of memory that holds 7s."""
        shape = list(self.whole.shape)
        cut = self.dimension if num_shards > 1 else None
        if cut is not None:
            shape[cut] //= num_shards
        shards = num_shards if cut is not None else 1
        return ParameterPiece(self.name, torch.full(shape, 7.0), cut, shards, shard_rank, self.sections, False)


@dataclass(frozen=True)
class UnequalRows:
    """Concatenate sections of these relative sizes."""

    sizes: tuple[int, ...]

    def join(self, parts: Sequence[Tensor], hf_config: Any) -> Tensor:
        return torch.cat(list(parts))

    def split(self, parameter: Tensor, num_parts: int, hf_config: Any) -> Sequence[Tensor]:
        unit = len(parameter) // sum(self.sizes)
        return parameter.split([size * unit for size in self.sizes])


def put_together(parts: list[SourcePart], case: Case, hf_config: Any) -> Tensor:
    """Reads each part's slice, and nothing else, into a tensor of zeros."""
    tensors = []
    for part in parts:
        whole = case.tensors[part.source.name]
        assert part.shape == tuple(whole.shape)
        tensors.append(torch.zeros(part.local_shape))
        part.in_file_order(tensors[-1]).copy_(whole[tuple(slice(*limits) for limits in part.ranges)])
    return case.rule.layout.join(tensors, hf_config)


def sampled(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


def stacked_of_experts(entry: Tensor) -> Tensor:
    """The entry of the expert of the examples, between others."""
    return torch.stack([entry if expert == EXPERT else -entry for expert in range(EXPERTS)])


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, int, Any]:
    shards = draw(st.sampled_from([1, 2, 4]))
    rows, columns = shards * draw(st.integers(1, 3)), shards * draw(st.integers(1, 3))
    is_stacked, is_transposed = draw(st.booleans()), draw(st.booleans())
    kind = draw(st.sampled_from(["one", "vector", "gated", "sections", "interleaved", "query groups", "vocabulary"]))
    hf_config = SimpleNamespace(vocab_size=1000, num_attention_heads=1, num_key_value_heads=1, head_dim=1)

    def in_file(tensor: Tensor) -> Tensor:
        tensor = tensor.t().contiguous() if is_transposed else tensor
        return stacked_of_experts(tensor) if is_stacked else tensor

    def source(name: str) -> Source:
        return Source(name, is_stacked=is_stacked, is_transposed=is_transposed)

    def with_expert(found: Rule) -> Rule:
        return Rule(found.sources, found.layout, found.alternatives, EXPERT)

    if kind == "one":
        whole = sampled(rows, columns)
        case = Case(with_expert(rule(source("a"))), {"a": in_file(whole)}, whole, draw(st.sampled_from([0, 1, None])))
    elif kind == "vector":
        whole = sampled(rows)
        tensor = stacked_of_experts(whole) if is_stacked else whole
        found = with_expert(rule(Source("a", is_stacked=is_stacked)))
        case = Case(found, {"a": tensor}, whole, draw(st.sampled_from([0, None])))
    elif kind == "gated":
        gate, up = sampled(rows, columns), -sampled(rows, columns)
        found = with_expert(rule(source("gate"), source("up")))
        tensors = {"gate": in_file(gate), "up": in_file(up)}
        case = Case(found, tensors, torch.cat([gate, up]), 0, sections=(1, 1))
    elif kind == "sections":
        sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=2, max_size=4)))
        in_first = draw(st.integers(1, len(sizes)))
        whole = sampled(rows * sum(sizes), columns)
        cut = rows * sum(sizes[:in_first])
        names = ["first"] * in_first + ["second"] * (len(sizes) - in_first)
        tensors = {"first": in_file(whole[:cut])} | ({"second": in_file(whole[cut:])} if "second" in names else {})
        found = with_expert(rule(*map(source, names), layout=UnequalRows(sizes)))
        case = Case(found, tensors, whole, 0, sections=sizes)
    elif kind == "interleaved":
        mixed = sampled(2 * rows, columns)
        found = with_expert(rule(source("both"), layout=InterleavedRows()))
        whole = torch.cat([mixed[0::2], mixed[1::2]])
        case = Case(found, {"both": in_file(mixed)}, whole, 0, sections=(1, 1))
    elif kind == "query groups":
        per_group, head_dim = draw(st.integers(1, 3)), draw(st.integers(1, 2))
        hf_config.num_key_value_heads, hf_config.num_attention_heads = rows, rows * per_group
        hf_config.head_dim = head_dim
        tensors = {
            name: sampled(heads * head_dim, columns) + 1000 * number
            for number, (name, heads) in enumerate({"q": rows * per_group, "k": rows, "v": rows}.items())
        }
        layout = QueryGroups()
        whole = layout.join(list(tensors.values()), hf_config)
        case = Case(rule("q", "k", "v", layout=layout), tensors, whole, 0)
    else:
        hf_config.vocab_size = vocabulary = draw(st.integers(1, rows))
        real = sampled(vocabulary, columns)
        whole = torch.nn.functional.pad(real, (0, 0, 0, rows - vocabulary))
        case = Case(rule("embed"), {"embed": real}, whole, 0, name="output_layer.weight")
    return case, shards, hf_config


@settings(deadline=None, max_examples=examples(150))
@given(sampled_case=cases())
def test_slices_of_tensors_make_the_slice_of_the_parameter(sampled_case: tuple[Case, int, Any]) -> None:
    case, num_shards, hf_config = sampled_case
    elements = 0
    for shard_rank in range(num_shards):
        piece = case.piece(num_shards, shard_rank)
        parts = source_parts(piece, case.rule, case.rule.sources, hf_config, EXPERTS)
        expected = piece.slice_of(case.whole)
        assert torch.equal(put_together(parts, case, hf_config), expected)
        elements += sum(torch.Size([stop - start for start, stop in part.ranges]).numel() for part in parts)
    # Together the ranks read every number once, where a parameter is cut.
    if case.dimension is not None:
        wanted = sum(tensor[EXPERT].numel() if case.rule.sources[0].is_stacked else tensor.numel()
                     for tensor in case.tensors.values())  # fmt: skip
        assert elements == wanted


def test_part_of_a_parameter_s_memory_is_seen_as_it_lies_in_the_file() -> None:
    # The second rank of two holds rows 4 to 7 of a vocabulary of 6, and the file has two of them.
    piece = ParameterPiece("output_layer.weight", sampled(4, 2), 0, 2, 1, (1,), False)
    found = rule("embed")
    (part,) = source_parts(piece, found, found.sources, SimpleNamespace(vocab_size=6), None)
    assert (part.shape, part.ranges, part.local_shape) == ((6, 2), ((4, 6), (0, 2)), (4, 2))
    view = part.in_file_order(piece.local)
    assert view.tolist() == [[1, 2], [3, 4]]
    view.zero_()
    assert piece.local.tolist() == [[0, 0], [0, 0], [5, 6], [7, 8]]


def test_expert_of_a_transposed_stack() -> None:
    # `[experts, inputs, outputs]`; the first of two ranks holds the first 2 of 4 outputs.
    piece = ParameterPiece("x.mlp.experts.1.linear_fc1.weight", sampled(2, 3), 0, 2, 0, (1,), True)
    source = Source("stack", is_stacked=True, is_transposed=True)
    found = Rule((source,), Rows(), (), EXPERT)
    (part,) = source_parts(piece, found, found.sources, SimpleNamespace(vocab_size=6), EXPERTS)
    assert (part.shape, part.ranges) == ((3, 3, 4), ((1, 2), (0, 3), (0, 2)))
    assert part.in_file_order(piece.local).tolist() == [[[1, 4], [2, 5], [3, 6]]]
