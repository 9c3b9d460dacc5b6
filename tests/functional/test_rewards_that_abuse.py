# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A whole run of GRPO whose reward function abuses the process that calls it: the run ends, and leaves nothing."""

import gc
import json
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import psutil
import pytest

from nemo_rl_moe.rewards.interface import ScoringItem
from nemo_rl_moe.runs.folder.run_data import read_run
from tests.functional import grpo_runs, sft_runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NOTES = "ABUSIVE_REWARD_NOTES"
KEPT: list[bytes] = []


def _allocate() -> object:
    KEPT.append(b"x" * 2**30)
    return 1.0


def _fork() -> object:
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    (Path(os.environ[NOTES]) / str(child)).touch()
    return 1.0


def _leave_threads() -> object:
    for _ in range(20):
        threading.Thread(target=time.sleep, args=(600,), daemon=False).start()
    return 1.0


def _close_files() -> object:
    os.closerange(3, 400)
    return 1.0


def _write_much() -> object:
    print("\x1b]0;title\x07\x1b[2J" + "x" * 10**6)
    sys.stderr.write("\x1b[31m" * 1000 + "\n")
    os.write(1, b"\x1b[2J" * 1000 + b"\n")
    return 1.0


def _patch() -> object:
    for name in ("time", "monotonic", "sleep", "perf_counter"):
        setattr(time, name, lambda *_: 0.0)
    math.exp = math.sqrt = lambda *_: -1.0  # type: ignore[assignment]
    json.dumps = json.loads = lambda *_, **__: "patched"  # type: ignore[assignment]
    gc.disable()
    sys.setrecursionlimit(60)
    os.environ.clear()
    os.chdir("/")
    return 1.0


ABUSES = (
    _allocate,
    _fork,
    _leave_threads,
    _close_files,
    _write_much,
    _patch,
    lambda: time.sleep(600),
    lambda: sys.exit(0),
    lambda: os._exit(0),
    lambda: os.kill(os.getpid(), signal.SIGTERM),
    lambda: "\x1b[2J",
    lambda: (1.0, "yes"),
    lambda: [1.0],
    lambda: b"1",
    lambda: 10**400,
    lambda: (_ for _ in ()),
    lambda: type("Number", (float,), {"__float__": lambda self: sys.exit(3)})(1.0),
)


def abusive(item: ScoringItem) -> object:
    """Every other response is scored in peace."""
    place = sum(map(ord, item.response)) + len(item.response)
    if place % 2 == 0:
        return float(place % 3)
    return ABUSES[place // 2 % len(ABUSES)]()


def test_the_run_ends_and_nothing_is_left(tmp_path: Path) -> None:
    data, notes = grpo_runs.make_prompts(tmp_path / "data", 40), tmp_path / "notes"
    notes.mkdir()
    overrides = grpo_runs.settings(
        tmp_path,
        data,
        **sft_runs.only_jsonl(),
        env__reward__kind="callable",
        env__reward__function="tests.functional.test_rewards_that_abuse:abusive",
        env__score_truncated=True,
        env__reward__timeout_s=2,
        data__validation=None,
        grpo__max_num_steps=2,
    )
    with mock.patch.dict(os.environ, {NOTES: str(notes)}):
        done = grpo_runs.run(overrides, tmp_path)
    reported = f"warning: env.reward.function: {__name__}:abusive failed to score a response, which is not trained on"
    assert reported in done.stdout
    for text in (done.stdout, done.stderr):
        assert [c for c in set(text) if c not in "\n\t" and not c.isprintable()] == []
    metrics = read_run(sft_runs.only_run_folder(tmp_path)).metrics
    assert metrics["train/loss"].steps.tolist() == [1, 2]
    for key, series in metrics.items():
        assert all(map(math.isfinite, series.values.tolist())), key
    assert all(0 < number < 16 for number in metrics["train/env/num_errors"].values)
    left = [int(path.name) for path in notes.iterdir() if psutil.pid_exists(int(path.name))]
    assert [pid for pid in left if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE] == []
