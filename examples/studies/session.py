# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""One process of a study: it starts Ray once, and then makes one run after the other."""

import fcntl
import os
import statistics
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

import psutil

from examples.studies.results import Measures, Result, RunT, measures_of, read_result
from nemo_rl_moe.atomic_writes import delete
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.distributed.local_ray import LocalRay
from nemo_rl_moe.distributed.run_process import StopSignals
from nemo_rl_moe.errors import TrainingDivergedError
from nemo_rl_moe.launch.start import RunLaunch, launch_run
from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME, read_history

CONSOLE_FILE = "console.txt"
PLACES = 2
"""CPUs of Ray for a run and the engines. Ray only counts CPUs, and does not bind processes to them."""


@dataclass(frozen=True)
class Study(Generic[RunT]):
    """Shared parts of all runs.

    Attributes:
        output: Folder of the study.
        config: Returns the configuration of a run, or raises `ConfigurationError`.
        measures: Measures of a run.
    """

    output: Path
    config: Callable[[RunT], GRPOMasterConfig]
    measures: Measures

    @property
    def runs_folder(self) -> Path:
        """Folder with a folder for each run."""
        return self.output / "runs"


def settings_of_run(output: Path, name: str, model_name: str, data: Path) -> list[str]:
    """Return the settings of a run for its initial model, prompts and logs.

    Args:
        output: Folder of the study.
        name: Name of the run.
        data: Folder of the prompts for training and validation.
    """
    return [
        f"policy.model_name={model_name}",
        f"data.train.path={data / 'grpo.jsonl'}",
        f"data.validation.path={data / 'validation_prompts.jsonl'}",
        f"logger.log_dir={output / 'runs' / name}",
    ]


@contextmanager
def running_ray(job: int) -> Iterator[None]:
    """Run Ray on one core, and end it afterwards.

    A worker has as many threads as its process has cores. With one core, the order of all sums, and so every number of
    a run, is the same on all machines.

    Args:
        job: Any number, such as the number of this process, which selects the core.
    """
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray = LocalRay(num_cpus=PLACES)
    try:
        _keep_on_core(job)
        yield
    finally:
        ray.shutdown()


def _keep_on_core(number: int) -> None:
    """Bind this process, Ray's servers and all their future children to one core."""
    cores = sorted(os.sched_getaffinity(0))
    here = psutil.Process()
    for process in (here, *here.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            process.cpu_affinity([cores[number % len(cores)]])


def median_seconds(results: Iterable[Result], guess: float) -> float:
    """Return the median seconds of a run, since the first one of a session takes longer."""
    return statistics.median([result.seconds for result in results] or [guess])


@contextmanager
def claimed(study: Study[RunT], run: RunT) -> Iterator[bool]:
    """Claim a run for this process. Yields False if another process has it."""
    folder = study.output / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / run.name).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True  # the operating system releases the lock when the process ends in any way


def make_runs(
    study: Study[RunT], runs: Sequence[RunT], stop_signals: StopSignals, report: Callable[[RunT, Result], None]
) -> None:
    """Make the runs that are neither complete nor claimed by another process, one after the other.

    Args:
        stop_signals: A request to stop ends the present run after its step. The run begins again another time.
        report: Called after each run.

    Raises:
        UserError: A configuration or an input cannot be used.
        WorkerDiedError: A run failed.
    """
    for run in runs:
        with claimed(study, run) as is_mine:
            if not is_mine or read_result(study.runs_folder / run.name) is not None:
                continue
            result = make_run(study, run, stop_signals)
            if result is None:
                return
            report(run, result)


def make_run(study: Study[RunT], run: RunT, stop_signals: StopSignals) -> Result | None:
    """Make one run from its beginning, and write its result. Returns None if it was asked to stop."""
    folder = study.runs_folder / run.name
    delete(folder)
    config = study.config(run)
    folder.mkdir(parents=True)
    started, diverged = time.monotonic(), None
    console = (folder / CONSOLE_FILE).open("w", encoding="utf-8")
    with console, redirect_stdout(console), redirect_stderr(console):
        try:
            launch_run(config, RunLaunch(uuid.uuid4().hex), stop_signals)
        except TrainingDivergedError as error:
            diverged = str(error)
    if stop_signals.reason() is not None:
        return None
    (metrics,) = folder.glob(f"*/{METRICS_FILE_NAME}")
    measures = {} if diverged is not None else measures_of(read_history(metrics), study.measures)
    result = Result(time.monotonic() - started, measures, diverged)
    result.write(folder)
    return result
