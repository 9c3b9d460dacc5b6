# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A run whose wall clock jumps by days: durations, limits and locks rest on the clock that only goes forward."""

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from nemo_rl_moe.runs.folder.run_data import read_run
from tests.functional import sft_runs, shared_ray

pytestmark = [pytest.mark.shared_ray, pytest.mark.slow]

DAY_S = 86_400.0


def jumping(offsets_s: tuple[float, ...]) -> Callable[[], float]:
    """A wall clock that is set to another time whenever it is read."""
    real, offsets = time.time, itertools.cycle(offsets_s)
    return lambda: real() + next(offsets)


def test_a_run_and_its_resume_are_as_with_a_steady_clock(tmp_path: Path) -> None:
    data = sft_runs.make_additions(tmp_path / "data", 100, 20)

    def settings(folder: Path, num_steps: int) -> list[str]:
        return sft_runs.settings(
            folder,
            data,
            sft__max_num_steps=num_steps,
            sft__val_period=2,
            checkpointing__save_period=1,
            checkpointing__metric_name=None,
            checkpointing__keep_top_k=2,
            policy__megatron_cfg__scheduler__lr_warmup_iters=1,
            policy__megatron_cfg__scheduler__lr_decay_iters=4,
            policy__train_global_batch_size=16,
            policy__train_micro_batch_size=8,
            cluster__cpu_workers_per_node=1,
            **sft_runs.only_jsonl(),
        )

    steady, jumpy = tmp_path / "steady", tmp_path / "jumpy"
    sft_runs.run_here(settings(steady, 4), steady)
    started = time.monotonic()
    with mock.patch("time.time", jumping((0.0, 400 * DAY_S, -DAY_S))):
        for num_steps in (2, 4):
            done = sft_runs.run_here(settings(jumpy, num_steps), jumpy)
    took_s = time.monotonic() - started
    expected, found = (read_run(sft_runs.only_run_folder(folder)).metrics for folder in (steady, jumpy))
    assert found["train/loss"].steps.tolist() == [1, 2, 3, 4]
    assert found["train/loss"].values.tolist() == expected["train/loss"].values.tolist()
    assert found["val/loss"].values[-1] == expected["val/loss"].values[-1]
    seconds = {key: series.values for key, series in found.items() if key.startswith("timing/") and key.endswith("_s")}
    for key, values in seconds.items():
        assert all(0 <= value <= took_s for value in values), (key, values)
    for words in (["watch", "--once"], ["report"], ["verify"]):
        done = shared_ray.called_here([*words, str(sft_runs.only_run_folder(jumpy))])
        assert not done.stderr
