# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The loop's own logic: how many steps, which batches, when it validates, and what it logs once."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.algorithms.sft import SupervisedTraining, run_validation, train_sft
from nemo_rl_moe.algorithms.step_recorder import RunSummary, num_training_steps
from nemo_rl_moe.checkpoints.state import LoopState
from nemo_rl_moe.config.schema import SFTConfig
from nemo_rl_moe.data.chat import TokenizedExample
from nemo_rl_moe.data.loader import GlobalBatchLoader, sequential_batches
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.metrics import MetricSeries, Reduction
from nemo_rl_moe.models.interfaces import LossFunction, TrainResult
from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad
from nemo_rl_moe.runs.folder.artifacts import EXPERT_LOAD
from tests.support.grpo_fakes import ListLogger
from tests.support.loggers import DiaryOfCheckpoints, make_recorder

BATCH_SIZE = 2
NUM_EXAMPLES = 7  # three batches an epoch, one example left over


@dataclass
class CountingPolicy:
    """A policy whose numbers are known beforehand: the loss of step `n` is `1 / n`, and nothing is learned.

    Attributes:
        tracks_experts: Whether MoE metrics and loads come back.
        trained: Sample ids of each `train` call.
        evaluated: Number of `train` calls before each `evaluate` call, and its sample ids.
    """

    tracks_experts: bool = False
    trained: list[tuple[str, ...]] = field(default_factory=list)
    evaluated: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)

    def train(self, batch: TokenBatch, loss_function: LossFunction) -> TrainResult:
        assert loss_function is sft_loss
        self.trained.append(batch.sample_ids)
        step = len(self.trained)
        load = ExpertLoad((0,), torch.tensor([[step, step]]))
        return TrainResult(
            global_loss=1 / step,
            grad_norm=2.0 * step,
            lr=1e-3,
            num_microbatches=1,
            num_tokens=int(batch.lengths.sum()),
            microbatch_metrics={"num_valid_tokens": MetricSeries((float(batch.num_valid_tokens()),), Reduction.SUM)},
            moe_metrics={"load_balancing_loss": 1.0 + step} if self.tracks_experts else {},
            artifacts={EXPERT_LOAD.name: load} if self.tracks_experts else {},
        )

    def evaluate(self, batch: TokenBatch, loss_function: LossFunction) -> dict[str, MetricSeries]:
        """The loss of a batch is the mean length of its sequences, found by two ranks."""
        assert loss_function is sft_loss
        self.evaluated.append((len(self.trained), batch.sample_ids))
        half = batch.lengths.double().mean().item() / 2
        return {
            "loss": MetricSeries((half, half), Reduction.SUM),
            "accuracy": MetricSeries((1 / batch.num_valid_tokens(), 0.0), Reduction.SUM),
        }

    def save_weights(self, directory: Path) -> None:
        raise AssertionError("saving is not the loop's")

    def shutdown(self) -> None:
        raise AssertionError("stopping the workers is not the loop's")


def examples(lengths: list[int], prefix: str) -> list[TokenizedExample]:
    """All tokens but the first are trained on."""
    return [
        TokenizedExample(
            np.arange(length, dtype=np.int32), np.arange(length) > 0, truncated=False, sample_id=f"{prefix}{index}"
        )
        for index, length in enumerate(lengths)
    ]


def sft_config(**changes: Any) -> SFTConfig:
    fields: dict[str, Any] = {
        "max_num_epochs": 1,
        "max_num_steps": None,
        "val_period": 0,
        "val_batches": None,
        "val_at_start": False,
        "val_at_end": False,
        "seed": 0,
    }
    return SFTConfig(**{**fields, **changes})


@dataclass
class Loop:
    """One run of the loop and all that it did."""

    policy: CountingPolicy
    logger: ListLogger
    loads: list[tuple[int, ExpertLoad]]
    summary: RunSummary


def run_loop(config: SFTConfig, *, tracks_experts: bool = False, with_validation: bool = True, **keeping: Any) -> Loop:
    policy, logger = CountingPolicy(tracks_experts), ListLogger()
    loads: list[tuple[int, ExpertLoad]] = []
    loader = GlobalBatchLoader(examples([4] * NUM_EXAMPLES, "train "), BATCH_SIZE, pad_token_id=0, seed=config.seed)
    held_out = examples([3, 5, 9], "held out ")

    def validation_batches() -> Iterator[TokenBatch]:
        return sequential_batches(held_out, BATCH_SIZE, pad_token_id=0, max_batches=config.val_batches)

    summary = train_sft(
        config,
        policy,
        loader,
        validation_batches if with_validation else None,
        make_recorder(logger, loads, **keeping),
    )
    return Loop(policy, logger, loads, summary)


@pytest.mark.parametrize(
    ("epochs", "max_steps", "expected"),
    [(1, None, 3), (4, None, 12), (4, 5, 5), (1, 5, 3), (2, 6, 6), (1, 1, 1)],
)
def test_number_of_steps(epochs: int, max_steps: int | None, expected: int) -> None:
    config = sft_config(max_num_epochs=epochs, max_num_steps=max_steps)
    assert num_training_steps(config, steps_per_epoch=3) == expected
    loop = run_loop(config)
    assert len(loop.policy.trained) == loop.summary.num_steps == expected
    assert [step for step, _ in loop.logger.records] == list(range(1, expected + 1))


def test_each_epoch_takes_each_example_at_most_once_in_an_order_of_its_own() -> None:
    trained = run_loop(sft_config(max_num_epochs=3)).policy.trained
    epochs = [[name for batch in trained[start : start + 3] for name in batch] for start in (0, 3, 6)]
    assert all(len(set(epoch)) == 6 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert trained == run_loop(sft_config(max_num_epochs=3)).policy.trained, "the seed alone decides"
    assert trained != run_loop(sft_config(max_num_epochs=3, seed=1)).policy.trained


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"val_at_start": True}, [0]),
        ({"val_at_end": True}, [6]),
        ({"val_period": 4}, [4]),
        ({"val_period": 2}, [2, 4, 6]),
        ({"val_period": 2, "val_at_end": True, "val_at_start": True}, [0, 2, 4, 6]),
        ({"val_period": 5, "val_at_end": True}, [5, 6]),
        ({"val_period": 7}, []),
    ],
)
def test_when_it_validates(changes: dict[str, Any], expected: list[int]) -> None:
    loop = run_loop(sft_config(max_num_epochs=2, **changes))
    assert loop.logger.steps_with("val/loss") == loop.logger.steps_with("val/accuracy") == expected
    # Both batches each time, and at no other time.
    assert [done for done, _ in loop.policy.evaluated] == [step for step in expected for _ in range(2)]
    assert loop.logger.steps_with("timing/validation/seconds") == expected
    assert loop.logger.steps_with("train/loss") == list(range(1, 7))


@given(
    period=st.integers(0, 9),
    at_start=st.booleans(),
    at_end=st.booleans(),
    epochs=st.integers(1, 3),
    max_steps=st.none() | st.integers(1, 10),
)
def test_one_record_a_step(period: int, at_start: bool, at_end: bool, epochs: int, max_steps: int | None) -> None:
    config = sft_config(
        val_period=period, val_at_start=at_start, val_at_end=at_end, max_num_epochs=epochs, max_num_steps=max_steps
    )
    loop = run_loop(config)
    steps = [step for step, _ in loop.logger.records]
    assert steps == list(range(0 if at_start else 1, loop.summary.num_steps + 1))
    validated = loop.logger.steps_with("val/loss")
    assert len(loop.policy.evaluated) == 2 * len(validated)
    due = {0} if at_start else set()
    due |= set(range(period, steps[-1] + 1, period)) if period else set()
    due |= {steps[-1]} if at_end else set()
    assert validated == sorted(due)


def test_what_a_step_logs() -> None:
    loop = run_loop(sft_config(val_at_end=True), tracks_experts=True)
    step, metrics = loop.logger.records[-1]
    assert step == 3
    timings = {key: metrics.pop(key) for key in list(metrics) if key.startswith("timing/")}
    assert timings.keys() == {
        "timing/step/seconds",
        "timing/train/seconds",
        "timing/train/tokens_per_second",
        "timing/validation/seconds",
    }
    assert timings["timing/train/seconds"] <= timings["timing/step/seconds"]
    assert all(value > 0 for value in timings.values())
    assert timings["timing/train/tokens_per_second"] == pytest.approx(8 / timings["timing/train/seconds"])
    assert metrics == {
        "train/loss": 1 / 3,
        "train/grad_norm": 6.0,
        "train/lr": 1e-3,
        "train/num_microbatches": 1.0,
        "train/num_tokens": 8.0,
        "train/skipped_updates": 0.0,
        "train/num_valid_tokens": 6.0,
        "train/moe/load_balancing_loss": 4.0,
        "val/loss": pytest.approx((4.0 * 6 + 9.0 * 8) / 14),
        "val/accuracy": pytest.approx(2 / 14),
    }


def test_expert_loads_arrive_once_a_step() -> None:
    loads = run_loop(sft_config(), tracks_experts=True).loads
    assert [(step, load.counts.tolist()) for step, load in loads] == [(step, [[step, step]]) for step in (1, 2, 3)]
    assert run_loop(sft_config()).loads == []


def test_summary() -> None:
    summary = run_loop(sft_config(val_at_start=True, val_period=3), tracks_experts=True).summary
    assert summary.num_steps == 3
    assert summary.first_validation["val/loss"] == summary.last_validation["val/loss"] == pytest.approx(96 / 14)
    assert summary.last_training["train/loss"] == 1 / 3
    assert summary.last_training["train/moe/load_balancing_loss"] == 4.0
    assert all(key.startswith("train/") for key in summary.last_training)


def test_without_validation_data() -> None:
    asked_for = sft_config(val_at_start=True, val_at_end=True, val_period=1)
    loop = run_loop(asked_for, with_validation=False)
    assert loop.policy.evaluated == []
    assert (loop.summary.first_validation, loop.summary.last_validation) == ({}, {})


@pytest.mark.parametrize(("max_batches", "expected"), [(None, ["01", "2"]), (1, ["01"])])
def test_validation_takes_the_first_batches_in_order(max_batches: int | None, expected: list[str]) -> None:
    loop = run_loop(sft_config(val_at_start=True, val_batches=max_batches))
    names = ["".join(name[-1] for name in batch) for _, batch in loop.policy.evaluated]
    assert names == expected


def test_validation_batches_of_uneven_size_are_weighed_by_their_tokens() -> None:
    # Batches of 2 + 4 and of 8 trained tokens, with losses 4 and 9 and one match each.
    batches = sequential_batches(examples([3, 5, 9], "held out "), BATCH_SIZE, pad_token_id=0)
    loader = GlobalBatchLoader(examples([4] * 2, "train "), BATCH_SIZE, pad_token_id=0, seed=0)
    means = run_validation(SupervisedTraining(sft_config(), CountingPolicy(), loader, sft_loss, lambda: batches))
    assert means["val/loss"] == pytest.approx((4.0 * 6 + 9.0 * 8) / 14, rel=1e-15)
    assert means["val/accuracy"] == pytest.approx((1 + 1) / 14, rel=1e-15)
    assert means.keys() == {"val/loss", "val/accuracy", "timing/validation/seconds"}


@given(stop_after=st.integers(1, 8), period=st.integers(0, 3))
def test_a_run_that_is_stopped_and_resumed_does_what_one_that_never_stopped_does(stop_after: int, period: int) -> None:
    config = sft_config(max_num_epochs=3, val_period=2, val_at_start=True)
    whole = run_loop(config)
    checkpoints = DiaryOfCheckpoints(period=period)
    asked = iter(["SIGTERM" if step == stop_after else None for step in range(1, 10)])
    first = run_loop(config, checkpoints=checkpoints, stop_reason=lambda: next(asked))
    assert (first.summary.num_steps, first.summary.stopped_for) == (stop_after, "SIGTERM")
    periodic = [step for step in range(1, stop_after) if period and step % period == 0]
    assert [state.step for state in checkpoints.states] == [*periodic, stop_after]
    second = run_loop(config, start=checkpoints.states[-1])
    assert first.policy.trained + second.policy.trained == whole.policy.trained
    steps = [step for step, _ in [*first.logger.records, *second.logger.records]]
    assert steps == [step for step, _ in whole.logger.records]
    assert second.summary.num_steps == 9
    assert second.summary.stopped_for is None
    assert second.summary.first_validation == whole.summary.first_validation


def test_a_finished_run_does_nothing_more() -> None:
    done = LoopState(step=3, batches_taken=3, last_training={"train/loss": 0.5})
    loop = run_loop(sft_config(val_at_start=True), start=done, checkpoints=DiaryOfCheckpoints())
    assert (loop.policy.trained, loop.logger.records) == ([], [])
    assert loop.summary.last_training == {"train/loss": 0.5}
