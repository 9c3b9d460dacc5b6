# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The second size of a microbatch: patches of its distinct images."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_moe.distributed.bin_packing import first_fit_decreasing
from nemo_rl_moe.distributed.microbatches import (
    Batching,
    DynamicBatching,
    PackedBatching,
    plan_evaluation,
    plan_microbatches,
)
from nemo_rl_moe.distributed.patch_limit import Images, most_neighbours, of_groups
from tests.support.quick_list import examples

SIZES = {number: 1 + 3 * number for number in range(7)}
"""Patches of each image that there is."""
LIMIT = 20
images_of_one = st.sets(st.sampled_from(sorted(SIZES)), max_size=3).map(
    lambda numbers: {number: SIZES[number] for number in numbers}
)


def patches(images: Iterable[Mapping[int, int]]) -> int:
    """Return the patches of distinct images."""
    return sum({number: size for own in images for number, size in own.items()}.values())


@settings(deadline=None, max_examples=examples(100))
@given(st.lists(images_of_one, max_size=12), st.sampled_from([None, 1, LIMIT]))
def test_most_neighbours_is_the_definition(images: list[Images], most: int | None) -> None:
    expected = []
    for start in range(len(images)):
        end = start + 1
        while end < len(images) and (most is None or _fits(images[start : end + 1], most)):
            end += 1
        expected.append(end - start)
    assert most_neighbours(images, most) == expected


def _fits(images: list[Images], most: int) -> bool:
    """Within the limit, or the same images in each item."""
    return patches(images) <= most or all(own == images[0] for own in images)


@settings(deadline=None, max_examples=examples(100))
@given(st.lists(st.tuples(st.integers(1, 20), images_of_one), max_size=30))
def test_first_fit_with_images_is_the_definition(items: list[tuple[int, Images]]) -> None:
    sizes, images = [size for size, _ in items], [own for _, own in items]
    expected: list[list[int]] = []
    for item in sorted(range(len(items)), key=lambda index: (-sizes[index], index)):
        for others in expected:
            together = [images[other] for other in [*others, item]]
            if sum(sizes[other] for other in others) + sizes[item] <= 20 and _fits(together, LIMIT):
                others.append(item)
                break
        else:
            expected.append([item])
    assert first_fit_decreasing(sizes, 20, images, LIMIT) == expected


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    ranks, multiple, group_size = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    kind: Any = draw(st.sampled_from([DynamicBatching(60, 5), PackedBatching(60), PackedBatching(64, 4)]))
    size = ranks * multiple * draw(st.integers(1, 5))
    count = size * group_size * draw(st.integers(1, 2))
    return {
        "lengths": draw(st.lists(st.integers(1, 30), min_size=count, max_size=count)),
        "images": draw(st.lists(images_of_one, min_size=count, max_size=count)),
        "num_data_parallel_ranks": ranks,
        "microbatch_multiple": multiple,
        "group_size": group_size,
        "batching": dataclasses.replace(kind, max_patches=LIMIT),
        "global_batch_size": size,
    }


@settings(deadline=None, max_examples=examples(100))
@given(cases())
def test_no_microbatch_takes_more_than_the_limit_or_one_group_alone(case: dict[str, Any]) -> None:
    size, ranks, multiple = case["global_batch_size"], case["num_data_parallel_ranks"], case["microbatch_multiple"]
    for_evaluation = {name: value for name, value in case.items() if name != "global_batch_size"}
    evaluation = plan_evaluation(**for_evaluation)
    filled = [*case["images"], *(case["images"][index] for index in evaluation.fillers)]
    for by_rank in (*plan_microbatches(**case).global_batches, evaluation.by_rank):
        assert len(by_rank) == ranks
        (number,) = {len(of_rank) for of_rank in by_rank}
        assert number % multiple == 0
        for indices in (indices for of_rank in by_rank for indices in of_rank):
            of_them = of_groups([filled[index] for index in indices], case["group_size"])
            assert _fits(of_them, LIMIT)
            assert patches(of_them) <= max(LIMIT, *map(patches, ([own] for own in of_them)))
    every = [i for by_rank in plan_microbatches(**case).global_batches for rank in by_rank for one in rank for i in one]
    assert sorted(every) == list(range(len(case["lengths"])))
    assert len(plan_microbatches(**case).global_batches) == len(case["lengths"]) // size // case["group_size"]


def test_a_filler_has_the_images_of_the_sequence_that_it_repeats() -> None:
    """Three images that fill the limit each, of two sequences, two, and the shortest one, which is run twice."""
    images = [{number: LIMIT} for number in (0, 0, 1, 1, 2)]
    batching = PackedBatching(60, max_patches=LIMIT)
    plan = plan_evaluation([5, 5, 4, 4, 3], num_data_parallel_ranks=2, batching=batching, images=images)
    assert plan.fillers == (4,)
    filled = [*images, images[4]]
    for indices in (indices for of_rank in plan.by_rank for indices in of_rank):
        assert patches(filled[index] for index in indices) == LIMIT


@pytest.mark.parametrize("batching", [DynamicBatching(60, 5), PackedBatching(60)])
def test_without_a_limit_images_change_nothing(batching: Batching) -> None:
    lengths = [(7 * number) % 23 + 1 for number in range(24)]
    common: Any = {"num_data_parallel_ranks": 2, "global_batch_size": 12, "batching": batching}
    with_images = plan_microbatches(lengths, images=[SIZES] * 24, **common)
    assert with_images == plan_microbatches(lengths, **common)


@pytest.mark.parametrize("kind", [DynamicBatching, PackedBatching])
def test_responses_to_one_image_count_it_once(kind: Any) -> None:
    """Two groups of eight: each image fills the limit, and its eight responses run together as without a limit."""
    images = [{1: LIMIT}] * 8 + [{2: LIMIT}] * 8
    lengths = [5] * 8 + [4] * 8
    (by_rank,) = plan_microbatches(
        lengths, num_data_parallel_ranks=1, global_batch_size=16, batching=kind(1000, max_patches=LIMIT), images=images
    ).global_batches
    assert by_rank == ((tuple(range(8)), tuple(range(8, 16))),)
    alone = kind(1000, max_patches=LIMIT - 1)
    (by_rank,) = plan_microbatches(
        lengths, num_data_parallel_ranks=1, global_batch_size=16, batching=alone, images=images
    ).global_batches
    assert by_rank == ((tuple(range(8)), tuple(range(8, 16))),), "one more of the same image costs the tower nothing"
