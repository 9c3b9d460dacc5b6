# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_moe.distributed.microbatches import (
    Batching,
    DynamicBatching,
    PackedBatching,
    PlainBatching,
    plan_evaluation,
    plan_microbatches,
)
from nemo_rl_moe.errors import ConfigurationError
from tests.support.quick_list import examples

MAX_LENGTH = 40


def tokens_in_memory(batching: Batching, lengths: list[int]) -> int:
    if isinstance(batching, PackedBatching):
        multiple = batching.sequence_multiple
        return sum((length + multiple - 1) // multiple * multiple for length in lengths)
    return max(lengths) * len(lengths)


budgets = st.one_of(
    st.builds(DynamicBatching, st.integers(MAX_LENGTH, 200), st.sampled_from([0, 5, 30, 1000])),
    st.builds(PackedBatching, st.integers(MAX_LENGTH, 200), st.sampled_from([1, 2, 4, 8])),
)


@st.composite
def training_cases(draw: st.DrawFn) -> dict:
    ranks, multiple = draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 2, 3]))
    batching = draw(st.one_of(st.builds(PlainBatching, st.integers(1, 4)), budgets))
    unit = ranks * multiple * (batching.micro_batch_size if isinstance(batching, PlainBatching) else 1)
    size = unit * draw(st.integers(1, 6))
    count = size * draw(st.integers(1, 3))
    return {
        "lengths": draw(st.lists(st.integers(1, MAX_LENGTH), min_size=count, max_size=count)),
        "num_data_parallel_ranks": ranks,
        "global_batch_size": size,
        "batching": batching,
        "microbatch_multiple": multiple,
    }


@settings(deadline=None, max_examples=examples(50))
@given(training_cases())
def test_training_plan_keeps_its_promises(case: dict):
    plan = plan_microbatches(**case)
    lengths, size, batching = case["lengths"], case["global_batch_size"], case["batching"]
    assert len(plan.global_batches) == len(lengths) // size
    for number, by_rank in enumerate(plan.global_batches):
        microbatches = [microbatch for rank in by_rank for microbatch in rank]
        every_index = sorted(index for microbatch in microbatches for index in microbatch)
        assert every_index == list(range(number * size, (number + 1) * size))
        assert len(by_rank) == case["num_data_parallel_ranks"]
        assert {len(rank) for rank in by_rank} == {plan.num_microbatches[number]}
        assert plan.num_microbatches[number] % case["microbatch_multiple"] == 0
        for microbatch in microbatches:
            assert microbatch
            if isinstance(batching, PlainBatching):
                assert len(microbatch) == batching.micro_batch_size
            else:
                assert tokens_in_memory(batching, [lengths[index] for index in microbatch]) <= batching.max_tokens
    assert plan == plan_microbatches(**case)


@settings(deadline=None, max_examples=examples(50))
@given(
    st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=40),
    st.integers(1, 5),
    st.one_of(st.builds(PlainBatching, st.integers(1, 4)), budgets),
    st.integers(1, 3),
)
def test_evaluation_plan_takes_any_size(lengths: list[int], ranks: int, batching: Batching, multiple: int):
    plan = plan_evaluation(lengths, num_data_parallel_ranks=ranks, batching=batching, microbatch_multiple=multiple)
    indices = sorted(index for rank in plan.by_rank for microbatch in rank for index in microbatch)
    assert indices == list(range(len(lengths) + len(plan.fillers)))
    assert all(lengths[index] == min(lengths) for index in plan.fillers)
    (count,) = {len(rank) for rank in plan.by_rank}
    assert count % multiple == 0
    if not isinstance(batching, PlainBatching):
        filled = lengths + [lengths[index] for index in plan.fillers]
        for rank in plan.by_rank:
            for microbatch in rank:
                assert tokens_in_memory(batching, [filled[index] for index in microbatch]) <= batching.max_tokens


def test_plain_by_hand():
    plan = plan_microbatches(
        [5] * 16, num_data_parallel_ranks=2, global_batch_size=8, batching=PlainBatching(micro_batch_size=2)
    )
    assert plan.global_batches == ((((0, 1), (2, 3)), ((4, 5), (6, 7))), (((8, 9), (10, 11)), ((12, 13), (14, 15))))
    assert plan.num_microbatches == (2, 2)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_plain_microbatches_do_not_depend_on_the_ranks(ranks: int):
    plan = plan_microbatches(
        [5] * 24, num_data_parallel_ranks=ranks, global_batch_size=24, batching=PlainBatching(micro_batch_size=3)
    )
    in_order = [microbatch for rank in plan.global_batches[0] for microbatch in rank]
    assert in_order == [tuple(range(start, start + 3)) for start in range(0, 24, 3)]


def test_dynamic_by_hand():
    # By length, 10 6 5 3 3 2 2: 31 tokens. The budget of 12 needs three microbatches, and two ranks an even number.
    # Four of them, 10 | 6 5 | 3 3 | 2 2, compute 32 tokens, six 31: one token is not worth two more. Turns: work 12
    # with 10, then 6 with 4; the rank that ran 10 gets the 6.
    lengths = [3, 6, 10, 2, 5, 3, 2]
    (by_rank,) = plan_microbatches(
        lengths, num_data_parallel_ranks=2, global_batch_size=7, batching=DynamicBatching(12, overhead_tokens=1)
    ).global_batches
    as_lengths = [[sorted(lengths[index] for index in microbatch) for microbatch in rank] for rank in by_rank]
    assert as_lengths == [[[6, 5][::-1], [2, 2]], [[10], [3, 3]]]


def test_packed_by_hand():
    # Rounded up to multiples of 4: 8 4 12 4 8. First fit decreasing into 16: (12, 4), (8, 8), (4).
    (by_rank,) = plan_microbatches(
        [5, 4, 9, 1, 8],
        num_data_parallel_ranks=1,
        global_batch_size=5,
        batching=PackedBatching(16, sequence_multiple=4),
    ).global_batches
    assert by_rank == (((0, 4), (1, 2), (3,)),)


def test_batching_by_tokens_needs_fewer_microbatches():
    lengths = [8] * 30 + [64] * 2
    plain = plan_microbatches(
        lengths, num_data_parallel_ranks=2, global_batch_size=32, batching=PlainBatching(micro_batch_size=1)
    )
    for batching in (DynamicBatching(128), PackedBatching(128)):
        plan = plan_microbatches(lengths, num_data_parallel_ranks=2, global_batch_size=32, batching=batching)
        assert plan.num_microbatches[0] == 2 < plain.num_microbatches[0]


def test_evaluation_fillers_are_the_shortest():
    plan = plan_evaluation([7, 3, 9, 5, 6], num_data_parallel_ranks=2, batching=PlainBatching(micro_batch_size=2))
    assert plan.fillers == (1, 1, 1)
    assert plan.by_rank == (((0, 1), (2, 3)), ((4, 5), (6, 7)))
    assert plan_evaluation([7, 3], num_data_parallel_ranks=2, batching=PlainBatching(1)).fillers == ()


def plan_error(lengths: list[int], ranks: int, size: int, batching: Batching, **more: Any) -> str:
    with pytest.raises(ConfigurationError) as error:
        plan_microbatches(lengths, num_data_parallel_ranks=ranks, global_batch_size=size, batching=batching, **more)
    (problem,) = error.value.problems
    return problem


def test_error_texts():
    assert plan_error([5, 13, 2], 1, 3, DynamicBatching(12)) == (
        "policy.dynamic_batching.train_mb_tokens: got 12, expected at least 13: sequence 1 of the batch has 13 tokens"
    )
    assert plan_error([5, 9, 2], 1, 3, PackedBatching(11, sequence_multiple=4)) == (
        "policy.sequence_packing.train_mb_tokens: got 11, expected at least 12: sequence 1 of the batch has 9 tokens"
        " (12 when padded to a multiple of 4)"
    )
    assert plan_error([5, 9], 4, 2, PackedBatching(100)) == (
        "policy.train_global_batch_size: got 2, expected at least 4 (4 data-parallel ranks): every rank runs the"
        " same number of microbatches"
    )
    assert plan_error([1] * 6, 2, 6, PlainBatching(2)) == (
        "policy.train_global_batch_size: got 6, expected a multiple of 4 (2 data-parallel ranks x"
        " policy.train_micro_batch_size 2)"
    )
    assert "2 data-parallel ranks x 2 pipeline stages" in plan_error(
        [1] * 6, 2, 6, PlainBatching(2), microbatch_multiple=2
    )
    assert plan_error([1] * 6, 1, 4, PlainBatching(2)) == (
        "policy.train_global_batch_size: got 4, expected a divisor of the 6 sequences in the batch"
    )
    assert plan_error([10, 10, 10], 2, 3, DynamicBatching(10)) == (
        "3 sequences fill 3 microbatches, which cannot become 4, the next multiple of 2 that the ranks need; use a"
        " policy.train_global_batch_size that is a multiple of 2"
    )


def test_an_empty_sequence_or_batch_is_refused():
    with pytest.raises(ValueError, match="sequence 1 holds no token"):
        plan_microbatches([3, 0], num_data_parallel_ranks=1, global_batch_size=2, batching=PlainBatching(1))
    with pytest.raises(ValueError, match="nothing to evaluate"):
        plan_evaluation([], num_data_parallel_ranks=1, batching=PlainBatching(1))


@settings(deadline=None, max_examples=examples(50))
@given(
    st.lists(st.integers(1, MAX_LENGTH // 2), min_size=24, max_size=24),
    st.sampled_from([2, 3]),
    st.integers(1, 2),
    st.sampled_from([PlainBatching(2), DynamicBatching(70), PackedBatching(70), PackedBatching(72, 4)]),
)
def test_neighbours_of_a_group_share_a_microbatch(
    lengths: list[int], group_size: int, ranks: int, batching: Batching
) -> None:
    common = {"num_data_parallel_ranks": ranks, "batching": batching, "group_size": group_size}
    training = plan_microbatches(lengths, global_batch_size=4, **common)
    evaluation = plan_evaluation(lengths[: 5 * group_size], **common)
    assert len(training.global_batches) == 24 // group_size // 4
    filled = lengths[: 5 * group_size] + [lengths[index] for index in evaluation.fillers]
    for values, by_rank in [*((lengths, batch) for batch in training.global_batches), (filled, evaluation.by_rank)]:
        for microbatch in (microbatch for rank in by_rank for microbatch in rank):
            groups = [microbatch[start : start + group_size] for start in range(0, len(microbatch), group_size)]
            assert all(group == tuple(range(group[0], group[0] + group_size)) for group in groups)
            assert all(group[0] % group_size == 0 for group in groups)
            if isinstance(batching, PlainBatching):
                assert len(groups) == batching.micro_batch_size
            else:
                assert tokens_in_memory(batching, [values[index] for index in microbatch]) <= batching.max_tokens
    every_index = sorted(i for batch in training.global_batches for rank in batch for one in rank for i in one)
    assert every_index == list(range(24))
    assert sorted(i for rank in evaluation.by_rank for one in rank for i in one) == list(range(len(filled)))


def test_error_texts_of_groups() -> None:
    assert plan_error([1, 1, 1, 1], 1, 4, PlainBatching(1), group_size=2) == (
        "policy.train_global_batch_size: got 4, expected a divisor of the 2 groups of 2 sequences in the batch"
    )
    assert plan_error([1, 1, 5, 9], 1, 2, DynamicBatching(17), group_size=2) == (
        "policy.dynamic_batching.train_mb_tokens: got 17, expected at least 18: sequences 2 to 3 of the batch, which"
        " run together, have 5 and 9 tokens (18 with padding)"
    )
    assert plan_error([1, 1, 5, 9], 1, 2, PackedBatching(13), group_size=2) == (
        "policy.sequence_packing.train_mb_tokens: got 13, expected at least 14: sequences 2 to 3 of the batch, which"
        " run together, have 5 and 9 tokens"
    )


def test_a_group_with_a_common_prompt_runs_together() -> None:
    lengths, shared = [12, 11, 14, 13] * 3, [0, 10, 10, 10] * 3
    plan = plan_microbatches(
        lengths,
        num_data_parallel_ranks=1,
        global_batch_size=12,
        batching=PackedBatching(20),
        shared=shared,
    )
    ((microbatches,),) = plan.global_batches
    assert sorted(microbatches) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 5])
@pytest.mark.parametrize("most_tokens", [14, 20, 33, 200])
def test_shared_tokens_count_once_and_ranks_get_equal_numbers(num_ranks: int, most_tokens: int) -> None:
    lengths, shared = [12, 11, 14, 13, 9, 9, 3, 12, 12, 12], [0, 10, 10, 10, 0, 8, 0, 2, 11, 11]
    plan = plan_evaluation(
        lengths, num_data_parallel_ranks=num_ranks, batching=PackedBatching(most_tokens), shared=shared
    )
    assert len({len(of_rank) for of_rank in plan.by_rank}) == 1
    indices = [index for of_rank in plan.by_rank for microbatch in of_rank for index in microbatch]
    assert sorted(indices) == list(range(len(lengths) + len(plan.fillers)))
    for microbatch in (microbatch for of_rank in plan.by_rank for microbatch in of_rank):
        filled = [*lengths, *(lengths[index] for index in plan.fillers)]
        neighbours = [index for index in microbatch if index - 1 in microbatch and index < len(lengths)]
        assert sum(filled[index] for index in microbatch) - sum(shared[index] for index in neighbours) <= most_tokens
