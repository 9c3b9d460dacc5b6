# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_rl_moe.routing.metrics.overload_factor import (
    StageEvents,
    assignments_over_capacity,
    cumulative_peak_ratios,
    overload_factors,
    rank_loads,
    what_if_metrics,
)
from tests.support.made_runs import predict_overload, summarise_overload
from tests.support.quick_list import examples

Events = list[tuple[int, int, int]]


def test_assignments_over_capacity_by_hand() -> None:
    loads = torch.tensor([[[6, 2], [4, 4], [0, 0]], [[3, 2], [9, 0], [1, 1]]])
    # Capacities of 1.1 times the mean: 4, 4 and 0, and 2, 4 and 1.
    assert assignments_over_capacity(loads, 1.1).tolist() == [2 + 1 + 5, 32]
    assert assignments_over_capacity(loads, 2.0).tolist() == [0, 32]


def no_pipeline(microbatches: int) -> Events:
    return [(kind, 0, m) for m in range(microbatches) for kind in (1, -1)]


def one_forward_one_backward(stages: int, stage: int, microbatches: int) -> Events:
    """Warm-up forwards, then forward and backward in turn, then the remaining backwards."""
    warmup = min(stages - stage - 1, microbatches)
    events = [(1, 0, m) for m in range(warmup)]
    for m in range(microbatches - warmup):
        events += [(1, 0, warmup + m), (-1, 0, m)]
    return events + [(-1, 0, m) for m in range(microbatches - warmup, microbatches)]


def interleaved(stages: int, stage: int, microbatches: int, chunks: int) -> Events:
    """Rounds of as many microbatches as there are stages go through chunk after chunk; backward in reversed chunks."""
    passes = [
        (chunk, m)
        for first in range(0, microbatches, stages)
        for chunk in range(chunks)
        for m in range(first, first + stages)
    ]
    forwards = [(1, chunk, m) for chunk, m in passes]
    backwards = [(-1, chunks - 1 - chunk, m) for chunk, m in passes]
    warmup = min((stages - stage - 1) * 2 + (chunks - 1) * stages, len(forwards))
    events = forwards[:warmup]
    for position in range(len(forwards) - warmup):
        events += [forwards[warmup + position], backwards[position]]
    return events + backwards[len(forwards) - warmup :]


def random_counts(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 30, shape, generator=torch.Generator().manual_seed(seed))


def walk(counts: Tensor, expert_parallel_size: int, stage: StageEvents) -> float:
    """The definition, layer after layer and rank after rank."""
    slices, _, _, experts = counts.shape
    block = experts // expert_parallel_size
    worst = 0.0
    for d in range(slices):
        held = [0.0] * expert_parallel_size
        held_if_balanced = peak_if_balanced = 0.0
        peaks = [0.0] * expert_parallel_size
        for kind, chunk, m in stage.events:
            layers = list(stage.chunk_layers[chunk])
            for layer in layers if kind == 1 else reversed(layers):
                loads = [
                    int(counts[d, m, layer, r * block : (r + 1) * block].sum()) for r in range(expert_parallel_size)
                ]
                held = [h + kind * n for h, n in zip(held, loads, strict=True)]
                held_if_balanced += kind * sum(loads) / expert_parallel_size
                peaks = [max(p, h) for p, h in zip(peaks, held, strict=True)]
                peak_if_balanced = max(peak_if_balanced, held_if_balanced)
        worst = max(worst, *(p / peak_if_balanced for p in peaks))
    return worst


def test_rank_loads_are_sums_over_blocks_of_experts() -> None:
    counts = torch.tensor([1, 2, 3, 4, 5, 6]).expand(2, 3, 4, 6)
    assert rank_loads(counts, 3).shape == (2, 3, 4, 3)
    assert rank_loads(counts, 3)[1, 2, 3].tolist() == [3, 7, 11]
    with pytest.raises(ValueError, match="6 experts cannot be split evenly over 4 ranks"):
        rank_loads(counts, 4)


@pytest.mark.parametrize(
    ("loads", "expected"),
    [([5, 5, 5], 1.0), ([9, 0, 0], 3.0), ([0, 7], 2.0), ([1, 2, 3], 1.5), ([0, 0, 0], 1.0), ([7], 1.0), ([0], 1.0)],
)
def test_hand_worked_factors(loads: list[int], expected: float) -> None:
    assert overload_factors(torch.tensor([[[loads]]])).item() == expected


def test_hand_worked_step() -> None:
    # One slice, two microbatches, two layers, four experts on two ranks.
    counts = torch.tensor([[[[3, 1, 2, 2], [4, 4, 0, 0]], [[0, 0, 1, 2], [2, 2, 2, 2]]]])
    stage = StageEvents(no_pipeline(2), [[0, 1]])
    metrics = summarise_overload(counts, 2, [1, 3], [stage], per_layer=True)
    # Loads of the ranks: (4, 4), (8, 0) and (0, 3), (4, 4).
    assert metrics == {
        "avg_overload_factor": 1.5,
        "max_overload_factor": 2.0,
        # Held at most: 12 and 4 after the first microbatch, 4 and 7 after the second; balanced: 8 at most.
        "max_cum_overload_factor": 1.5,
        "avg_overload_factor_layer_1": 1.5,
        "max_overload_factor_layer_1": 2.0,
        "avg_overload_factor_layer_3": 1.5,
        "max_overload_factor_layer_3": 2.0,
    }
    # Both microbatches in flight: 12 + 4 and 4 + 7 held, 13.5 balanced.
    pipelined = StageEvents(one_forward_one_backward(2, 0, 2), [[0, 1]])
    assert cumulative_peak_ratios(rank_loads(counts, 2), pipelined).tolist() == [[16 / 13.5, 11 / 13.5]]


def test_what_routed_nothing_has_no_part_in_the_mean() -> None:
    counts = torch.zeros(2, 2, 1, 4, dtype=torch.long)
    counts[0, 0, 0, 1] = 10
    metrics = summarise_overload(counts, 4, [0], [StageEvents(no_pipeline(2), [[0]])], per_layer=True)
    assert set(metrics.values()) == {4.0}
    nothing = summarise_overload(torch.zeros_like(counts), 4, [0], [StageEvents(no_pipeline(2), [[0]])], per_layer=True)
    assert set(nothing.values()) == {1.0}


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_balanced_is_exactly_one_and_a_hot_rank_exactly_the_number_of_ranks(ranks: int) -> None:
    events = [StageEvents(no_pipeline(3), [[0, 1]])]
    tokens = torch.tensor([7, 11, 13]).view(1, 3, 1, 1)
    balanced = torch.ones(2, 3, 2, 24, dtype=torch.long) * tokens
    assert set(summarise_overload(balanced, ranks, [0, 1], events, per_layer=True).values()) == {1.0}
    hot = torch.zeros_like(balanced)
    hot[..., 24 // ranks : 48 // ranks] = tokens
    assert set(summarise_overload(hot, ranks, [0, 1], events, per_layer=True).values()) == {float(ranks)}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("stages", "chunk_layers", "order"),
    [
        (1, [[[0, 1, 2, 3]]], lambda stage: no_pipeline(8)),
        (2, [[[0, 1]], [[2, 3]]], lambda stage: one_forward_one_backward(2, stage, 8)),
        (4, [[[0]], [[1]], [[2]], [[3]]], lambda stage: one_forward_one_backward(4, stage, 8)),
        (2, [[[0], [2]], [[1], [3]]], lambda stage: interleaved(2, stage, 8, chunks=2)),
        # A stage without any MoE layer, and a chunk without.
        (2, [[[]], [[0, 1, 2, 3]]], lambda stage: one_forward_one_backward(2, stage, 8)),
        (2, [[[], [0, 1]], [[2], [3]]], lambda stage: interleaved(2, stage, 8, chunks=2)),
    ],
    ids=["no-pipeline", "1f1b-2", "1f1b-4", "interleaved", "dense-stage", "dense-chunk"],
)
def test_cumulative_peak_is_that_of_a_walk_over_the_events(
    ranks: int, stages: int, chunk_layers: list[list[list[int]]], order: Callable[[int], Events]
) -> None:
    counts = random_counts(2, 8, 4, 8, seed=ranks)
    events = [StageEvents(order(stage), chunk_layers[stage]) for stage in range(stages)]
    for stage in events:
        # Every forward has its backward, after it.
        assert sorted((c, m) for k, c, m in stage.events if k == 1) == sorted(
            (c, m) for k, c, m in stage.events if k == -1
        )
        assert all(stage.events.index((1, c, m)) < stage.events.index((-1, c, m)) for _, c, m in stage.events)
    metrics = summarise_overload(counts, ranks, range(4), events)
    expected = max(walk(counts, ranks, stage) for stage in events if any(stage.chunk_layers))
    assert metrics["max_cum_overload_factor"] == pytest.approx(expected, rel=1e-12)


def test_without_events_there_is_no_cumulative_key() -> None:
    assert set(summarise_overload(random_counts(1, 1, 1, 4), 2, [0])) == {"avg_overload_factor", "max_overload_factor"}


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3)),
    ranks=st.sampled_from([1, 2, 3, 6]),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=examples(40))
def test_bounds_and_agreement_with_loops(shape: tuple[int, int, int], ranks: int, seed: int) -> None:
    slices, microbatches, layers = shape
    counts = random_counts(*shape, 6, seed=seed) * (random_counts(*shape, 1, seed=seed + 1) > 5)
    stage = StageEvents(no_pipeline(microbatches), [list(range(layers))])
    metrics = summarise_overload(counts, ranks, range(layers), [stage], per_layer=True)
    assert all(1 <= value <= ranks for key, value in metrics.items())
    factors = [
        max(loads) / (sum(loads) / ranks)
        for d in range(slices)
        for m in range(microbatches)
        for i in range(layers)
        if sum(loads := [int(block.sum()) for block in counts[d, m, i].split(6 // ranks)])
    ]
    assert metrics["avg_overload_factor"] == pytest.approx(sum(factors) / len(factors) if factors else 1.0)
    assert metrics["max_overload_factor"] == pytest.approx(max(factors, default=1.0))


def test_prediction_for_the_recorded_size_is_the_measurement() -> None:
    counts = random_counts(3, 4, 2, 12)
    measured = summarise_overload(counts, 4, [0, 1])
    predicted = predict_overload(counts, [4], recorded_expert_parallel_size=4)[4]
    assert predicted == (measured["avg_overload_factor"], measured["max_overload_factor"])


def test_a_larger_size_merges_consecutive_slices() -> None:
    # Four data-parallel ranks, each its own slice. Pairs balance each other: 0 with 1, 2 with 3.
    counts = torch.zeros(4, 1, 1, 4, dtype=torch.long)
    counts[[0, 2], ..., :2] = 5
    counts[[1, 3], ..., 2:] = 5
    assert predict_overload(counts, [2])[2] == (1.0, 1.0)
    assert summarise_overload(counts, 2, [0])["max_overload_factor"] == 2.0
    # All four merge, and so they do for more ranks than there were slices.
    assert predict_overload(counts[:2], [4])[4] == predict_overload(counts, [4])[4] == (1.0, 1.0)


def test_a_smaller_size_is_a_lower_bound() -> None:
    # Recorded by data-parallel rank, then given to the prediction as a run with 4 expert-parallel ranks would have it.
    by_rank = random_counts(8, 3, 2, 8, seed=3) + 1
    true = predict_overload(by_rank, [2])[2]
    recorded = torch.stack([group.sum(0) for group in by_rank.split(4)])
    predicted = predict_overload(recorded, [2], recorded_expert_parallel_size=4)[2]
    assert 1.0 <= predicted.maximum <= true.maximum
    # From a run of size 2, a size of 4 is exact.
    finer = torch.stack([group.sum(0) for group in by_rank.split(2)])
    assert predict_overload(finer, [4], recorded_expert_parallel_size=2) == predict_overload(by_rank, [4])


def test_what_if_keys() -> None:
    predictions = predict_overload(random_counts(1, 2, 2, 8), [1, 2])
    assert what_if_metrics(predictions) == {
        "what_if/avg_overload_factor_ep_1": 1.0,
        "what_if/max_overload_factor_ep_1": 1.0,
        "what_if/avg_overload_factor_ep_2": predictions[2].average,
        "what_if/max_overload_factor_ep_2": predictions[2].maximum,
    }
    with pytest.raises(ValueError, match="8 experts cannot be split evenly over 3 ranks"):
        predict_overload(random_counts(1, 1, 1, 8), [3])
