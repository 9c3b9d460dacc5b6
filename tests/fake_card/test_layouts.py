# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The branch for GPUs, on Megatron-Core as released, trains over NCCL as the branch for CPUs does over gloo.

Each layout is compared with the same layout: losses, gradient norms, MoE metrics and weights after two steps. The two
branches use other modules (Transformer Engine's, as the tests' stand-in has them), so sums differ in their order.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.fake_card.ranks import run_on_cards
from tests.support.gloo_ranks import run_ranks, run_ranks_with_engine
from tests.support.tiny_model import layout, sharing_sequences, tiny_policy
from tests.support.training_run import RankRun, RunSettings, difference_by_rank, train_run

ZERO_1 = {"distributed_data_parallel_config__use_distributed_optimizer": True}
LATE_WEIGHTS = {
    "distributed_data_parallel_config__overlap_grad_reduce": True,
    "distributed_data_parallel_config__overlap_param_gather": True,
    "distributed_data_parallel_config__bucket_size": 1000,  # a bucket for each matrix
    "logprob_chunk_size": 7,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, layout(tp=2)),  # with sequence parallelism
    "pp2": (2, layout(pp=2)),
    "ep2": (2, layout(ep=2)),
    "dp2": (2, ZERO_1),
    "dp2_late_weights": (2, ZERO_1 | LATE_WEIGHTS),
}
TOLERANCE = 1e-6
"""Of losses and norms relative, of metrics absolute. The largest seen is 2e-7."""
WEIGHTS_TOLERANCE = 1e-5
"""As between layouts over gloo: a weight moves by 1e-2 in two steps."""


def train_on_card(settings: RunSettings) -> tuple[RankRun, dict[str, int]]:
    """Run on each rank; return what it saw, and proofs that the card's branch ran."""
    import ctypes

    import torch

    from nemo_rl_moe.models.megatron.cpu import cpu_backend

    assert not cpu_backend.ACTIVE
    run = train_run(settings)
    library = ctypes.CDLL("libnccl.so.2")
    return run, {
        "collectives": library.fake_card_collectives(),
        "bytes": torch.cuda.max_memory_allocated(),
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_trains_on_cards_as_over_gloo(name: str) -> None:
    world_size, changes = LAYOUTS[name]
    settings = RunSettings(tiny_policy(world_size, **changes))
    _assert_same(run_on_cards(train_on_card, world_size, settings), run_ranks(train_run, world_size, settings))


def test_cards_that_share_sequences_train_as_over_gloo() -> None:
    """Both with the attention of the tests' stand-in, which gathers keys and values, not Transformer Engine's."""
    settings = RunSettings(sharing_sequences(tiny_policy(2, sequence_packing__enabled=True), 2))
    _assert_same(run_on_cards(train_on_card, 2, settings), run_ranks_with_engine(train_run, 2, settings))


def _assert_same(answers: Sequence[tuple[RankRun, Mapping[str, int]]], expected: list[RankRun]) -> None:
    found = [run for run, _ in answers]
    assert all(len(metrics) > 20 for run in found for metrics in run.moe_metrics)
    gaps = difference_by_rank(found, expected)
    assert gaps.weights <= WEIGHTS_TOLERANCE
    assert max(gaps.loss, gaps.grad_norm, gaps.moe_metrics) <= TOLERANCE, gaps
    for _, proof in answers:
        assert proof["bytes"] > 100_000
        assert len(answers) == 1 or proof["collectives"] > 10
