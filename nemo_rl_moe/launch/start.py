# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Start of a run: in the process of the command, or under a supervisor that restarts it. This module imports no
torch."""

import os
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_rl_moe.checkpoints.resume import find_resume_point
from nemo_rl_moe.config.algorithm import Algorithm, algorithm_of
from nemo_rl_moe.config.loading import dump_with_secrets, load_dumped
from nemo_rl_moe.config.schema import MasterConfig
from nemo_rl_moe.distributed.run_process import StopSignals, watch_this_process
from nemo_rl_moe.errors import EXIT_RUN_FAILED, UserError, printable
from nemo_rl_moe.launch.supervisor import Supervision, supervise
from nemo_rl_moe.masking import masked_assignment

if TYPE_CHECKING:
    from nemo_rl_moe.launch.training_run import TrainingRun


@dataclass(frozen=True)
class RunLaunch:
    """One launch of a run: the first one, or a restart after a failure.

    Attributes:
        run_id: Identifies the user's command. Restarts have the same id.
        restart_number: 0 for the first launch, then 1, 2, ...
        started: Time at which the command started, on the machine's monotonic clock, in seconds. None: now.
    """

    run_id: str
    restart_number: int = 0
    started: float | None = None


def train(config: MasterConfig, overrides: Sequence[str], *, owns_process: bool) -> int:
    """Run a configuration's algorithm from start to end, and return the exit code.

    Args:
        owns_process: Whether this process runs nothing else.
    """
    launch = RunLaunch(uuid.uuid4().hex, started=time.monotonic())
    if owns_process and config.cluster.max_restarts:
        _hide_secrets(overrides)
        return _supervise(config, launch)
    if owns_process:
        take_process(overrides, lambda: _print_resume_hint(config, launch))
    try:
        with StopSignals() as stop_signals:
            launch_run(config, launch, stop_signals)
    except Exception as error:
        # Errors without an exit code are bugs, and end with the exit code of a failed run.
        if getattr(error, "exit_code", EXIT_RUN_FAILED) == EXIT_RUN_FAILED and (hint := _resume_hint(config, launch)):
            error.add_note(hint)
        raise
    return 0


def train_supervised(launch: RunLaunch) -> int:
    """Run the configuration that the supervisor writes to standard input, and return the exit code. After a failure,
    the supervisor prints how to resume."""
    config = load_dumped(sys.stdin.read())
    watch_this_process()
    with StopSignals() as stop_signals:
        launch_run(config, launch, stop_signals)
    return 0


def launch_run(config: MasterConfig, launch: RunLaunch, stop_signals: StopSignals) -> None:
    """Run a configuration's algorithm from start to end, in this process.

    All problems of the input are reported before a worker starts or a file is written.
    """
    algorithm = algorithm_of(config)
    run_algorithm = entry_point_of(algorithm)
    from nemo_rl_moe.algorithms.losses.trial import check_losses
    from nemo_rl_moe.launch.training_run import TrainingRun

    check_losses(algorithm, config)

    with TrainingRun(config, launch, stop_signals) as run:
        run_algorithm(config, run)


def entry_point_of(algorithm: Algorithm) -> Callable[[Any, "TrainingRun"], None]:
    """Return the function that runs an algorithm: a built-in function, or the function that the algorithm's record
    names."""
    # Imported here, because torch takes seconds, and a supervisor does not need it.
    from nemo_rl_moe.launch.distillation import run_distillation
    from nemo_rl_moe.launch.dpo import run_dpo
    from nemo_rl_moe.launch.grpo import run_grpo
    from nemo_rl_moe.launch.ppo import run_ppo
    from nemo_rl_moe.launch.rm import run_rm
    from nemo_rl_moe.launch.sft import run_sft

    built_in: dict[str, Callable[[Any, TrainingRun], None]] = {
        "sft": run_sft,
        "dpo": run_dpo,
        "rm": run_rm,
        "grpo": run_grpo,
        "distillation": run_distillation,
        "ppo": run_ppo,
    }
    return built_in.get(algorithm.name) or algorithm.entry_point()


def take_process(overrides: Sequence[str], report_end: Callable[[], None] = lambda: None) -> None:
    """Prepare this process for a run: start its watcher, and mask secrets on its command line.

    Args:
        report_end: Called by the watcher to print how to resume, if this process ended without reporting its failure.
    """
    os.environ["PYTHONPATH"] = _search_path()
    _hide_secrets(overrides)  # before the watcher is forked, because it has the same command line
    watch_this_process(report_end)


def _hide_secrets(overrides: Sequence[str]) -> None:
    """Mask secrets on this process's command line. Other users, W&B and Ray's dashboard can see the command line."""
    shown = {text: masked_assignment(text) for text in overrides}
    words = [shown.get(word, word) for word in sys.argv]
    if words != sys.argv:
        # A title that overwrites the environment would hide the variable by which a run's processes are found.
        os.environ.setdefault("SPT_NOENV", "1")
        from ray._raylet import setproctitle  # type: ignore[attr-defined]

        sys.argv[:] = words
        setproctitle(" ".join([sys.executable, *words]))


def _supervise(config: MasterConfig, launch: RunLaunch) -> int:
    """Run the configuration in a separate process, restart it after failures, and return the last exit code."""
    os.environ["PYTHONPATH"] = _search_path()
    # -P: modules are searched in the same folders as in this process. The working folder is not added.
    words = [sys.executable, "-P", "-m", "nemo_rl_moe.cli", "run", "--run-id", launch.run_id]
    return supervise(
        Supervision(
            lambda number: [*words, "--restart-number", str(number), "--started", str(launch.started)],
            stdin=dump_with_secrets(config),
            max_restarts=config.cluster.max_restarts,
            resume_hint=lambda: _resume_hint(config, launch),
        )
    )


def _search_path() -> str:
    """Return the folders in which this process searches modules, for Ray's workers."""
    return os.pathsep.join(filter(None, [sys.path[0], os.environ.get("PYTHONPATH")]))


def _print_resume_hint(config: MasterConfig, launch: RunLaunch) -> None:
    if hint := _resume_hint(config, launch):
        print(printable(hint), file=sys.stderr, flush=True)


def _resume_hint(config: MasterConfig, launch: RunLaunch) -> str | None:
    """Return a line on how to resume a run that has failed, or None without a checkpoint."""
    try:
        point = find_resume_point(config, launch.run_id, 1, lambda problem: None)
    except (UserError, OSError):
        return None
    if point is None:
        return None
    how = "the same command" if config.checkpointing.resume == "auto" else "the command with checkpointing.resume=auto"
    return f"{how} goes on from {point.folder}"
