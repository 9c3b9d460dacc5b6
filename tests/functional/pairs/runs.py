# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A case as a run that stops after two steps and goes on to a third, on the Ray of this process."""

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.functional import sft_runs, shared_ray
from tests.functional.drill_accounts import Accounts as Queues
from tests.functional.drill_records import Logs
from tests.functional.pairs.accounts import Accounts
from tests.functional.pairs.cases import Case
from tests.functional.pairs.settings import NUM_STEPS, STEPS_BEFORE_STOP, Inputs, words
from tests.functional.run_kills import WORKER_TITLE, title_of

END_LIMIT_S = 60.0
POLL_S = 0.1
SHOWN_CHARACTERS = 3000
_PR_SET_CHILD_SUBREAPER = 36


def faults_of(case: Case, inputs: Inputs, folder: Path) -> list[str]:
    """Run a case, and return what is wrong with it.

    Args:
        case: The case.
        inputs: Data and models.
        folder: Empty; gets `logs`.
    """
    with _adopting():
        return _faults_of(case, inputs, folder)


@contextmanager
def _adopting() -> Iterator[None]:
    """Become the parent of processes that lose theirs: whoever leaves one behind is found."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _faults_of(case: Case, inputs: Inputs, folder: Path) -> list[str]:
    before, queues = _processes(), Queues(Logs(folder))
    for num_steps in (STEPS_BEFORE_STOP, NUM_STEPS):
        done = shared_ray.run_here(words(case.setting, inputs, folder, num_steps), folder / "work", exit_code=None)
        if done.returncode or "Traceback" in done.stderr:
            output = (done.stdout + done.stderr)[-SHOWN_CHARACTERS:]
            return [f"to step {num_steps}: exit code {done.returncode}\n{output}", *_left_behind(before)]
        if left := _left_behind(before):
            return left
        if num_steps == STEPS_BEFORE_STOP:
            queues.note_restart()
        elif (said := f": {STEPS_BEFORE_STOP} of {NUM_STEPS} steps are done") not in done.stdout:
            return [f"the run did not go on: no {said!r} in its output"]
    accounts = Accounts(case.setting, sft_runs.only_run_folder(folder))
    found = list(accounts.faults())
    # Without the optimizer's count of steps nobody can tell the age of the queue's tokens: its prompts are drawn again.
    if case.setting["rollouts"] != "synchronous" and case.setting["optimizer"] == "saved":
        groups = {group.position: group for step in accounts.schedule for group in step.groups}
        found += queues.faults_of_the_queue(groups)
    return found


def _processes() -> set[psutil.Process]:
    """Return this process's descendants, but for workers that Ray keeps for later: those that do not run an actor."""
    return {
        process
        for process in sft_runs.running(psutil.Process(os.getpid()).children(recursive=True))
        if not (title := title_of(process)).startswith("ray::") or title.startswith(WORKER_TITLE)
    }


def _left_behind(before: set[psutil.Process]) -> list[str]:
    """Wait until no process of a run is there any more; return those that stay."""
    deadline = time.monotonic() + END_LIMIT_S
    while left := _processes() - before:
        if time.monotonic() > deadline:
            return [f"left behind: {process.pid} {' '.join(process.cmdline())[:200]}" for process in left]
        time.sleep(POLL_S)
    return []
