# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""How a step ends: what is recorded when, when a checkpoint is begun, and what ends a run."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from nemo_rl_moe.algorithms.step_recorder import StepOutcome, StepRecorder
from nemo_rl_moe.checkpoints.state import LoopState
from nemo_rl_moe.errors import TrainingDivergedError
from nemo_rl_moe.metrics import MetricSeries, PhaseClock, Reduction
from nemo_rl_moe.models.interfaces import GpuUse, TrainResult
from tests.support.grpo_fakes import ListLogger
from tests.support.loggers import DiaryOfCheckpoints, make_recorder


def outcome(
    num_skipped: int = 0,
    in_a_row: int = 0,
    num_updates: int = 1,
    samples: Sequence[str] = ("a:1",),
    **validation: float,
) -> StepOutcome:
    result = TrainResult(
        global_loss=math.nan if num_skipped else 0.5,
        grad_norm=1.0,
        lr=1e-3,
        num_microbatches=1,
        num_tokens=4,
        microbatch_metrics={},
        moe_metrics={},
        num_updates=num_updates,
        num_skipped_updates=num_skipped,
        skipped_in_a_row=in_a_row,
    )
    measured = {f"val/{name}": value for name, value in validation.items()}
    return StepOutcome(7, result, {"train/loss": 0.5}, measured, samples)


def recorder_of(diary: list[str], **arguments: Any) -> StepRecorder:
    return make_recorder(ListLogger(diary=diary), checkpoints=DiaryOfCheckpoints(diary, period=2), **arguments)


def test_a_step_is_recorded_before_its_checkpoint_can_be_published() -> None:
    diary: list[str] = []
    recorder = recorder_of(diary, flush=lambda: diary.append("flush"))
    assert all(recorder.end_step(outcome(), PhaseClock(), is_last=False) for _ in range(3))
    assert not recorder.end_step(outcome(), PhaseClock(), is_last=True)
    # What waits to be written together with later steps is written, too: it is published when the next step ends.
    assert diary == ["log 1", "save 2", "log 2", "flush", "log 3", "save 4", "log 4", "flush"]


def test_saving_is_timed_as_a_phase_of_its_step() -> None:
    logger = ListLogger()
    recorder = make_recorder(logger, checkpoints=DiaryOfCheckpoints(period=2))
    for _ in range(2):
        recorder.end_step(outcome(), PhaseClock(), is_last=False)
    assert logger.steps_with("timing/checkpoint/seconds") == [2]


def test_use_of_gpus_is_recorded_with_the_step() -> None:
    logger = ListLogger()
    recorder = make_recorder(logger)
    use = GpuUse(1, 1, 10, None, {"max_memory_reserved_gb": MetricSeries((3.0, 5.0), Reduction.MAX)})
    measured = outcome()
    recorder.end_step(replace(measured, result=replace(measured.result, gpu_use=use)), PhaseClock(), is_last=False)
    ((_, metrics),) = logger.records
    assert metrics["performance/max_memory_reserved_gb"] == 5.0
    assert recorder.state.last_training == {"train/loss": 0.5}, "a resumed run has other speeds"


def test_a_stop_is_saved_and_reported() -> None:
    diary: list[str] = []
    recorder = recorder_of(diary, stop_reason=lambda: "SIGTERM")
    assert not recorder.end_step(outcome(), PhaseClock(), is_last=False)
    assert recorder.stopped_for == "SIGTERM"
    assert diary == ["save 1", "log 1"]
    recorder = recorder_of([], stop_reason=lambda: "SIGTERM")
    assert not recorder.end_step(outcome(), PhaseClock(), is_last=True)
    assert recorder.stopped_for is None, "it came with the last step: the run is complete"


def test_a_stop_saves_even_while_updates_are_skipped() -> None:
    diary: list[str] = []
    recorder = recorder_of(diary, stop_reason=lambda: "SIGTERM")
    assert not recorder.end_step(outcome(1, 1), PhaseClock(), is_last=False)
    assert diary == ["save 1", "log 1"]


def test_what_the_state_remembers() -> None:
    recorder = make_recorder(ListLogger())
    recorder.record_start({"val/loss": 3.0, "timing/validation/seconds": 1.0})
    assert (recorder.state.step, dict(recorder.state.first_validation)) == (0, {"val/loss": 3.0})
    recorder.end_step(outcome(), PhaseClock(), is_last=False)
    recorder.end_step(outcome(loss=2.0), PhaseClock(), is_last=False)
    assert recorder.state == LoopState(2, 7, {"val/loss": 3.0}, {"val/loss": 2.0}, {"train/loss": 0.5}, 0)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([(1, 1, 1)], 1),
        ([(1, 1, 1), (1, 1, 1)], 2),
        ([(1, 1, 1), (0, 0, 1)], 0),
        ([(2, 2, 2)], 2),
        ([(1, 1, 2), (1, 0, 2)], 0),
        ([(1, 1, 1), (1, 1, 2)], 1),
    ],
)
def test_skipped_updates_are_counted_over_steps(calls: list[tuple[int, int, int]], expected: int) -> None:
    recorder = make_recorder(ListLogger(), max_skipped_in_a_row=99)
    for skipped, in_a_row, updates in calls:
        recorder.end_step(outcome(skipped, in_a_row, updates), PhaseClock(), is_last=False)
    assert recorder.state.skipped_in_a_row == expected


def test_too_many_of_them_end_the_run() -> None:
    diary: list[str] = []
    recorder = recorder_of(diary)
    skipped = outcome(1, 1, samples=[f"data.jsonl:{line}" for line in range(10, 20)] * 2)
    assert all(recorder.end_step(outcome(), PhaseClock(), is_last=False) for _ in range(2))
    assert all(recorder.end_step(skipped, PhaseClock(), is_last=False) for _ in range(2))
    with pytest.raises(TrainingDivergedError) as raised:
        recorder.end_step(skipped, PhaseClock(), is_last=False)
    assert diary == ["log 1", "save 2", "log 2", "log 3", "log 4", "log 5", "finish"], "no checkpoint among them"
    assert len(raised.value.sample_ids) == 10
    lines = str(raised.value).splitlines()
    assert lines[0].startswith("step 5: 3 updates in a row were skipped")
    assert "policy.max_consecutive_skipped_updates: 3" in lines[0]
    assert lines[1].startswith("The step's samples: data.jsonl:10, data.jsonl:11, ")
    assert lines[1].endswith("data.jsonl:17 and 2 more.")
    assert lines[2] == "The last good checkpoint: step_2."


def test_without_checkpoints() -> None:
    recorder = make_recorder(ListLogger(), max_skipped_in_a_row=1)
    with pytest.raises(TrainingDivergedError, match="The last good checkpoint: none was saved"):
        recorder.end_step(outcome(1, 1), PhaseClock(), is_last=True)
    recorder.finish()
