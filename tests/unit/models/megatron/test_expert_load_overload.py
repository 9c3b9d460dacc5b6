# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Overload factors of real jobs, against a literal walk over what each rank recorded."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.models.megatron.training.observers import ExpertLoadReports
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from nemo_rl_moe.routing.metrics.overload_factor import what_if_metrics
from tests.support.gloo_ranks import run_ranks
from tests.support.made_runs import predict_overload
from tests.support.quick_list import full, listed, slow
from tests.support.tiny_model import (
    MICROBATCHES,
    layout,
    parallel_job,
    tiny_batch,
    tiny_hf_config,
    tiny_policy,
)
from tests.support.training_run import observer_of
from tests.unit.models.megatron.tiny_trainers import shard_for

EXPERTS, TOPK = 8, 2
# One microbatch with no token at all to train on is as good as any other for the routers.
KEYS = ("avg_overload_factor", "max_overload_factor", "max_cum_overload_factor")


@dataclass(frozen=True)
class RankRecord:
    """What one rank recorded and reported in a step, and its place."""

    slice_index: int  # rank in the expert-data-parallel group
    expert_rank: int  # rank in the expert-parallel group
    chunk_layers: list[list[int]]  # global indices of each chunk's MoE layers, as its routers know them
    events: list[tuple[int, int, int]]  # (kind, chunk, microbatch) in the order in which they ran
    counts: npt.NDArray[np.int64]  # [microbatches, layers, experts] of the tokens that this rank routed
    metrics: dict[str, float]


def record_step(
    world_size: int, settings: dict[str, Any], batches_in_step: int, capacity_factor: float | None = None
) -> RankRecord:
    """Runs on every rank. The second step, so that what the first one left behind would show.

    Dispatchers of CPUs drop nothing: the factor is given to the metrics alone.
    """
    policy = tiny_policy(world_size, **settings)
    with parallel_job(policy):
        from megatron.core import parallel_state
        from megatron.core.transformer.moe.router import TopKRouter

        trainer = MegatronTrainer(policy, tiny_hf_config(), None, num_steps=10)
        if capacity_factor is not None:
            trainer.config.moe_expert_rank_capacity_factor = capacity_factor  # type: ignore[attr-defined]
        for step in range(2):
            batches = [tiny_batch(100 * step + index) for index in range(batches_in_step)]
            shards = [shard_for(trainer, batch) for batch in batches]
            result = trainer.train(shards, sft_loss)
        recorder = observer_of(trainer, ExpertLoadReports).recorder
        return RankRecord(
            slice_index=parallel_state.get_expert_data_parallel_rank(),
            expert_rank=parallel_state.get_expert_model_parallel_rank(),
            chunk_layers=[
                [module.layer_number - 1 for module in chunk.modules() if isinstance(module, TopKRouter)]
                for chunk in trainer.chunks
            ],
            events=[tuple(event) for event in recorder.events],  # type: ignore[misc]
            counts=recorder.counts.numpy().copy(),
            metrics=result.moe_metrics,
        )


Sizes = tuple[tuple[str, int], ...]
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "single": (1, {}),
    "dp2": (2, {}),
    "ep2": (2, {"ep": 2}),
    "ep2_dp4": (4, {"ep": 2}),
    "pp2": (2, {"pp": 2}),
    "pp2_uneven": (2, {"pp": 2, "first": 3}),
    "pp2_vpp2": (2, {"pp": 2, "vpp": 2}),
    "pp2_ep2": (4, {"pp": 2, "ep": 2}),
    "pp2_vpp2_ep2": (4, {"pp": 2, "vpp": 2, "ep": 2}),
    "tp2_ep2": (2, {"tp": 2, "ep": 2}),
}


@cache
def records_of(name: str, batches_in_step: int = 1, **changes: Any) -> list[RankRecord]:
    world_size, sizes = LAYOUTS[name]
    return run_ranks(record_step, world_size, world_size, layout(**sizes) | changes, batches_in_step)


def counts_of_slices(records: Sequence[RankRecord]) -> dict[int, npt.NDArray[np.int64]]:
    """Slice to `[microbatches, layers, experts]`: the ranks that exchange tokens, and the stages, hold parts of it."""
    slices: dict[int, npt.NDArray[np.int64]] = {}
    for record in records:
        slices[record.slice_index] = slices.get(record.slice_index, 0) + record.counts
    return slices


def load_of_rank(counts: npt.NDArray[np.int64], microbatch: int, layer: int, rank: int, size: int) -> int:
    block = EXPERTS // size
    return int(counts[microbatch, layer, rank * block : (rank + 1) * block].sum())


def walk(records: Sequence[RankRecord], expert_parallel_size: int) -> dict[str, float]:
    """The definitions, word by word: rank after rank, event after event, layer after layer."""
    slices = counts_of_slices(records)
    overloads = []
    for counts in slices.values():
        for microbatch in range(counts.shape[0]):
            for layer in range(counts.shape[1]):
                loads = [
                    load_of_rank(counts, microbatch, layer, rank, expert_parallel_size)
                    for rank in range(expert_parallel_size)
                ]
                overloads.append(max(loads) / (sum(loads) / len(loads)))
    cumulative = []
    for record in records:
        counts = slices[record.slice_index]
        held = balanced = peak = balanced_peak = 0.0
        for kind, chunk, microbatch in record.events:
            layers = record.chunk_layers[chunk]
            for layer in layers if kind == 1 else reversed(layers):
                held += kind * load_of_rank(counts, microbatch, layer, record.expert_rank, expert_parallel_size)
                balanced += kind * int(counts[microbatch, layer].sum()) / expert_parallel_size
                peak, balanced_peak = max(peak, held), max(balanced_peak, balanced)
        cumulative.append(peak / balanced_peak)
    return dict(zip(KEYS, (sum(overloads) / len(overloads), max(overloads), max(cumulative)), strict=True))


@pytest.mark.parametrize(
    "name", listed(LAYOUTS, quick=["pp2_vpp2_ep2"], in_full=LAYOUTS.keys() - {"ep2_dp4", "pp2_ep2"})
)
def test_overload_is_what_a_walk_over_the_events_finds(name: str) -> None:
    records = records_of(name)
    size = LAYOUTS[name][1].get("ep", 1)
    expected = walk(records, size)
    for record in records:
        assert {key: record.metrics[key] for key in KEYS} == pytest.approx(expected, abs=1e-12)
    if size == 1:
        assert set(expected.values()) == {1.0}
        assert {record.metrics[key] for record in records for key in KEYS} == {1.0}
    else:
        assert 1.0 < expected["max_cum_overload_factor"] < expected["max_overload_factor"] < size


@pytest.mark.parametrize("name", ["dp2", *(slow(name) for name in ("ep2_dp4", "pp2_ep2"))])
def test_other_sizes_are_predicted_from_all_slices(name: str) -> None:
    """Ranks share the events out, after an exchange among the slices; as whoever has all counts would say."""
    sizes = (1, 2, 4, 8)
    records = records_of(name, moe_metrics__what_if_expert_parallel_sizes=str(list(sizes)))
    slices = counts_of_slices(records)
    counts = torch.from_numpy(np.stack([slices[index] for index in sorted(slices)]))
    expected = what_if_metrics(
        predict_overload(counts, sizes, recorded_expert_parallel_size=LAYOUTS[name][1].get("ep", 1))
    )
    assert len(expected) == 2 * len(sizes)
    for record in records:
        assert {key: record.metrics[key] for key in expected} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["tp2_ep2", *(slow(name) for name in ("ep2_dp4", "pp2_ep2"))])
@pytest.mark.parametrize("exchanges", [False, True])
def test_assignments_over_the_capacity_of_their_rank_are_counted(name: str, exchanges: bool) -> None:
    world_size, sizes = LAYOUTS[name]
    what_if = {"moe_metrics__what_if_expert_parallel_sizes": "[8]"} if exchanges else {}
    records = run_ranks(record_step, world_size, world_size, layout(**sizes) | what_if, 1, 1.05)
    over = total = 0
    for counts in counts_of_slices(records).values():
        for microbatch in range(counts.shape[0]):
            for layer in range(counts.shape[1]):
                loads = [load_of_rank(counts, microbatch, layer, rank, 2) for rank in range(2)]
                capacity = int(1.05 * sum(loads) / 2)
                over, total = over + sum(max(0, load - capacity) for load in loads), total + sum(loads)
    assert 0 < over < total
    assert {record.metrics["rank_capacity_dropped_share"] for record in records} == {over / total}
    assert "rank_capacity_dropped_share" not in records_of(name)[0].metrics


@pytest.mark.full
def test_overload_of_several_global_batches() -> None:
    records = records_of("pp2_ep2", batches_in_step=2)
    assert records[0].counts.shape[0] == 2 * len(MICROBATCHES) // 2
    assert {key: records[0].metrics[key] for key in KEYS} == pytest.approx(walk(records, 2), abs=1e-12)


@pytest.mark.full
def test_overload_per_layer() -> None:
    records = records_of("pp2_ep2")
    slices, metrics = counts_of_slices(records), records[0].metrics
    for layer in range(4):
        overloads = [
            max(loads) * 2 / sum(loads)
            for counts in slices.values()
            for microbatch in range(counts.shape[0])
            for loads in [[load_of_rank(counts, microbatch, layer, rank, 2) for rank in range(2)]]
        ]
        assert metrics[f"avg_overload_factor_layer_{layer}"] == pytest.approx(sum(overloads) / len(overloads))
        assert metrics[f"max_overload_factor_layer_{layer}"] == pytest.approx(max(overloads))


F, B = 1, -1
NO_PIPELINE = [(kind, 0, m) for m in range(4) for kind in (F, B)]
FIRST_OF_TWO = [(F, 0, 0), *[event for m in range(3) for event in ((F, 0, m + 1), (B, 0, m))], (B, 0, 3)]


@pytest.mark.full
@pytest.mark.parametrize("changes", [slow({}), {"activation_checkpointing": "full"}], ids=["plain", "recompute"])
def test_events_are_the_schedules(changes: dict[str, str]) -> None:
    assert [record.events for record in records_of("single", **changes)] == [NO_PIPELINE]
    assert [record.events for record in records_of("pp2", **changes)] == [FIRST_OF_TWO, NO_PIPELINE]
    first, last = (record.events for record in records_of("pp2_vpp2", **changes))
    forwards = [(chunk, m) for group in ((0, 1), (2, 3)) for chunk in (0, 1) for m in group]
    backwards = [(chunk, m) for group in ((0, 1), (2, 3)) for chunk in (1, 0) for m in group]
    # Before its first backward a stage runs two forwards for each stage after it, and one chunk's worth of a group.
    for events, warmup in ((first, 4), (last, 2)):
        assert [(chunk, m) for kind, chunk, m in events if kind == F] == forwards
        assert [(chunk, m) for kind, chunk, m in events if kind == B] == backwards
        kinds = [kind for kind, _, _ in events]
        assert kinds == [F] * warmup + [F, B] * (8 - warmup) + [B] * warmup


def test_events_of_several_global_batches_follow_one_another() -> None:
    first, last = (
        record.events
        for record in records_of("pp2_ep2", batches_in_step=2)
        if record.slice_index + record.expert_rank == 0
    )
    one_batch = [(F, 0, 0), (F, 0, 1), (B, 0, 0), (B, 0, 1)]
    assert first == one_batch + [(kind, chunk, m + 2) for kind, chunk, m in one_batch]
    assert last == [(kind, 0, m) for m in range(4) for kind in (F, B)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "layer_spec"),
    [
        slow("ep2", "local"),
        slow("ep2", "auto"),
        slow("pp2_ep2", "local"),
        full("pp2_ep2", "auto"),
        ("tp2_ep2", "local"),
        slow("tp2_ep2", "auto"),
    ],
)
def test_a_hot_rank_carries_everything(name: str, layer_spec: str) -> None:
    hot = 1
    for record in records_of(name, moe_router_force_hot_rank=hot, layer_spec=layer_spec):
        assert {record.metrics[key] for key in KEYS} == {2.0}
        block = EXPERTS // 2
        cold = np.delete(record.counts, np.s_[hot * block : (hot + 1) * block], axis=2)
        assert cold.sum() == 0
        assert record.counts.sum() > 0


@pytest.mark.parametrize("name", ["ep2", slow("pp2_ep2")])
def test_forced_balance_is_within_sampling_noise_of_one(name: str) -> None:
    records = records_of(name, moe_router_force_load_balancing=True)
    # A token's k experts are a random k of E, and rank 0 has half of them: its share is hypergeometric with variance
    # v = k/4 * (E-k)/(E-1). Of T tokens rank 0 gets T*k/2 + d with a deviation d of T*v, so one event's overload is
    # 1 + |d| / (T*k/2), whose mean and variance are those of a half-normal distribution. Six sigma on each side.
    variance = TOPK / 4 * (EXPERTS - TOPK) / (EXPERTS - 1)
    sigmas = []
    for counts in counts_of_slices(records).values():
        tokens = counts.sum(2).reshape(-1) / TOPK
        sigmas += [math.sqrt(variance * each) / (each * TOPK / 2) for each in tokens]
    mean = sum(sigmas) * math.sqrt(2 / math.pi) / len(sigmas)
    deviation = math.sqrt(sum(sigma**2 for sigma in sigmas) * (1 - 2 / math.pi)) / len(sigmas)
    metrics = records[0].metrics
    assert abs(metrics["avg_overload_factor"] - 1 - mean) < 6 * deviation
    assert metrics["max_overload_factor"] - 1 < 6 * max(sigmas)
    # What a pipeline holds is a sum over layers and microbatches, so it is no less even.
    assert 1 <= metrics["max_cum_overload_factor"] <= metrics["max_overload_factor"]
    assert metrics["cv_mean"] < 2 * metrics["cv_null_mean"]
