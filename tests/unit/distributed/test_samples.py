# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Plans of samples of several sequences: none is split over updates, all ranks run equally many microbatches."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_moe.distributed.batch import count_trained_sequences, make_shard, with_empty_rows
from nemo_rl_moe.distributed.microbatches import DynamicBatching, PackedBatching, PlainBatching, plan_microbatches
from nemo_rl_moe.errors import ConfigurationError
from tests.support.quick_list import examples
from tests.support.tiny_model import tiny_batch

MAX_LENGTH = 40


@st.composite
def cases(draw: st.DrawFn, most_sequences: int = 5) -> dict[str, Any]:
    ranks, multiple = draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 2, 3]))
    batching = draw(
        st.one_of(
            st.builds(PlainBatching, st.integers(1, 4)),
            st.builds(DynamicBatching, st.integers(MAX_LENGTH, 200), st.sampled_from([0, 30])),
            st.builds(PackedBatching, st.integers(MAX_LENGTH, 200), st.sampled_from([1, 4])),
        )
    )
    unit = ranks * multiple * (batching.micro_batch_size if isinstance(batching, PlainBatching) else 1)
    size = unit * draw(st.integers(1, 3))
    count = size * draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(1, most_sequences), min_size=count, max_size=count))
    return {
        "lengths": draw(st.lists(st.integers(1, MAX_LENGTH), min_size=sum(sizes), max_size=sum(sizes))),
        "num_data_parallel_ranks": ranks,
        "global_batch_size": size,
        "batching": batching,
        "microbatch_multiple": multiple,
        "sample_sizes": sizes,
    }


def size_of(batching: Any, lengths: list[int]) -> int:
    if isinstance(batching, PackedBatching):
        multiple = batching.sequence_multiple
        return sum((length + multiple - 1) // multiple * multiple for length in lengths)
    return len(lengths) * max(lengths)


@settings(deadline=None, max_examples=examples(100))
@given(cases())
def test_each_sequence_runs_once_in_the_update_of_its_sample(case: dict[str, Any]) -> None:
    plan = plan_microbatches(**case)
    lengths, sizes, per_update = case["lengths"], case["sample_sizes"], case["global_batch_size"]
    batching, fillers, first = case["batching"], [], 0
    for number, by_rank in enumerate(plan.global_batches):
        microbatches = [microbatch for rank in by_rank for microbatch in rank]
        end = first + sum(sizes[number * per_update : (number + 1) * per_update])
        rows = sorted(row for microbatch in microbatches for row in microbatch)
        empty = [row for row in rows if row >= len(lengths)]
        assert rows == [*range(first, end), *empty]
        assert {len(rank) for rank in by_rank} == {plan.num_microbatches[number]}
        assert plan.num_microbatches[number] % case["microbatch_multiple"] == 0
        if empty:
            assert all(len(microbatch) == 1 for microbatch in microbatches), "there is a sequence left to move"
            unit = case["num_data_parallel_ranks"] * case["microbatch_multiple"]
            assert len(empty) < unit, "fewer microbatches would do"
        for microbatch in microbatches:
            assert microbatch
            if isinstance(batching, PlainBatching):
                assert len(microbatch) <= batching.micro_batch_size
            elif microbatch[0] < len(lengths):
                assert size_of(batching, [lengths[row] for row in microbatch]) <= batching.max_tokens
        fillers += empty
        first = end
    assert first == len(lengths)
    assert fillers == list(range(len(lengths), len(lengths) + plan.num_fillers))


@settings(deadline=None, max_examples=examples(50))
@given(cases(most_sequences=1))
def test_samples_of_one_sequence_are_planned_as_sequences(case: dict[str, Any]) -> None:
    sizes = case.pop("sample_sizes")
    try:
        plain = plan_microbatches(**case)
    except ConfigurationError:  # microbatches of tokens that cannot become a multiple
        assert plan_microbatches(**case, sample_sizes=sizes).num_fillers
    else:
        assert plan_microbatches(**case, sample_sizes=sizes) == plain


def test_by_hand() -> None:
    common = {"num_data_parallel_ranks": 2, "global_batch_size": 2, "sample_sizes": [3, 2, 1, 1]}
    plan = plan_microbatches([5] * 7, batching=PlainBatching(1), **common)
    assert plan.global_batches == ((((0,), (1,), (2,)), ((3,), (4,), (7,))), (((5,),), ((6,),)))
    assert plan.num_fillers == 1
    with pytest.raises(ConfigurationError, match="got 3, expected a divisor of the 4 samples in the batch"):
        plan_microbatches([5] * 7, batching=PlainBatching(1), **{**common, "global_batch_size": 3})


def test_a_plan_of_two_a_microbatch_is_even() -> None:
    plan = plan_microbatches(
        [5] * 7, num_data_parallel_ranks=2, global_batch_size=4, batching=PlainBatching(2), sample_sizes=[4, 1, 1, 1]
    )
    assert plan.global_batches == ((((0,), (1, 2)), ((3, 4), (5, 6))),)


@pytest.mark.parametrize("batching", [DynamicBatching(9), PackedBatching(9)])
def test_an_empty_row_is_no_work_for_its_rank(batching: DynamicBatching | PackedBatching) -> None:
    """It stands beside the longest sequence, and the two shorter ones share the other rank."""
    common = {"num_data_parallel_ranks": 2, "global_batch_size": 2, "sample_sizes": [2, 1]}
    (by_rank,) = plan_microbatches([9, 5, 5], batching=batching, **common).global_batches
    assert sorted(sorted(row for microbatch in rank for row in microbatch) for rank in by_rank) == [[0, 3], [1, 2]]


def test_empty_rows_count_nowhere() -> None:
    batch = tiny_batch(1)
    filled = with_empty_rows(batch, 2)
    assert with_empty_rows(batch, 0) is batch
    assert filled.num_valid_tokens() == batch.num_valid_tokens()
    assert count_trained_sequences(filled) == count_trained_sequences(batch)
    assert filled.counted_lengths.tolist() == [*batch.lengths.tolist(), 0, 0]
    shard = make_shard(filled, [(0, 1), (9,)], batch)
    assert shard.microbatches[1].counted_lengths.tolist() == [0]
    assert shard.microbatches[1].input_ids.shape == (1, 2), "one target, as reductions over none are errors"
    assert shard.num_batch_sequences == 10
