# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""One process's part of a study: Ray and vLLM's engines once, and then run after run in them."""

import fcntl
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from examples.routing_study.engines import SHELF
from examples.routing_study.grid import Run
from examples.routing_study.measures import Result, measures_of, read_result
from nemo_rl_moe.atomic_writes import delete
from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.distributed.local_ray import LocalRay
from nemo_rl_moe.distributed.run_process import StopSignals
from nemo_rl_moe.errors import TrainingDivergedError
from nemo_rl_moe.launch.start import RunLaunch, launch_run
from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME, read_history

STUDY_CONFIG = Path(__file__).with_name("study.yaml")
CONSOLE_FILE = "console.txt"
PLACES = 2
"""CPUs of Ray that a run and the engines reserve; it counts them, and binds nobody to any."""


@dataclass(frozen=True)
class Study:
    """Parts that all runs share.

    Attributes:
        output: Folder of the study.
        model_name: Folder of the model that they begin with.
        data: Folder of the demo's sums.
        overrides: Further settings of all runs, over everything else.
    """

    output: Path
    model_name: str
    data: Path
    overrides: Sequence[str]

    @property
    def runs_folder(self) -> Path:
        """Holds a folder for each run."""
        return self.output / "runs"

    def config(self, run: Run) -> GRPOMasterConfig:
        """Return the configuration of a run.

        Raises:
            ConfigurationError: Something is wrong with it.
        """
        common = [
            f"policy.model_name={self.model_name}",
            f"data.train.path={self.data / 'grpo.jsonl'}",
            f"data.validation.path={self.data / 'validation_prompts.jsonl'}",
            f"logger.log_dir={self.runs_folder / run.name}",
        ]
        # How many responses there are is the user's choice; batches of one fit any.
        ones = ["policy.train_global_batch_size=1", "policy.train_micro_batch_size=1"]
        base = load_grpo_config(STUDY_CONFIG, [*common, *self.overrides, *ones])
        responses = base.grpo.num_prompts_per_step * base.grpo.num_generations_per_prompt
        own = run.overrides(responses, base.policy.logprob_batch_size)
        return load_grpo_config(STUDY_CONFIG, [*common, *own, *self.overrides])


@contextmanager
def running_ray(job: int) -> Iterator[None]:
    """Ray on one core, and the engines that runs start in it; ended whatever happens.

    A worker has as many threads as its process has cores: one core makes the order of all sums, and so every number of
    a run, the same on machines of any size.

    Args:
        job: Number of this process among those that work at the study, or any; chooses the core.
    """
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray = LocalRay(num_cpus=PLACES)
    try:
        _keep_on_core(job)
        yield
    finally:
        SHELF.close()
        ray.shutdown()


def _keep_on_core(number: int) -> None:
    """Binds this process, Ray's servers and all that they will start to one core."""
    cores = sorted(os.sched_getaffinity(0))
    here = psutil.Process()
    for process in (here, *here.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            process.cpu_affinity([cores[number % len(cores)]])


@contextmanager
def claimed(study: Study, run: Run) -> Iterator[bool]:
    """Claim to a run, which no other process has then; False where another one has it."""
    folder = study.output / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / run.name).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True  # the operating system takes it back when the process ends, however it ends


def make_runs(
    study: Study, runs: Sequence[Run], stop_signals: StopSignals, report_error: Callable[[Run, Result], None]
) -> None:
    """Make those runs that are neither done nor another process's, one after the other.

    Args:
        study: What they share.
        runs: In their order.
        stop_signals: A request to stop ends the present run after its step; it is made anew another time.
        report: Hears of each run that is done.

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
            report_error(run, result)


def make_run(study: Study, run: Run, stop_signals: StopSignals) -> Result | None:
    """Make one run from its beginning, and says in its folder that it is done; None where it was asked to stop."""
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
    measures = {} if diverged is not None else measures_of(read_history(metrics))
    result = Result(time.monotonic() - started, measures, diverged)
    result.write(folder)
    return result
