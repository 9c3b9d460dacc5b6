# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs in the process of the tests, on one Ray that they share.

A run that a user starts begins with imports of torch and a Ray of its own: ten seconds of every twenty. A test that
asks what a run computes and writes saves them; one about processes, signals, output or exit codes of the program types
the command.
"""

import os
import re
import subprocess
from collections.abc import Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest import mock

import ray
from ray.util import placement_group_table

from nemo_rl_moe.cli import main
from nemo_rl_moe.distributed.local_ray import object_store_bytes, preserved_handlers
from tests.conftest import REPOSITORY_ROOT
from tests.functional.forked_workers import WorkerServer

NUM_CPUS = 4
"""Places of workers, the most that one of the runs takes."""


_server: WorkerServer | None = None


def start_shared_ray() -> None:
    """Starts the Ray of this process's tests, unless it runs already with all its places free."""
    global _server
    if ray.is_initialized():
        if not _reserved_places():
            return
        end_shared_ray()  # a test that failed has left a cluster, for whose places all later ones would wait
    _server = WorkerServer()
    # Workers look for modules where a command's would; threads that wait for each other by spinning would take the
    # core from the process that they wait for.
    environment = {
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "OMP_WAIT_POLICY": "passive",
    }
    with mock.patch.dict(os.environ, environment), preserved_handlers():
        os.environ.pop("RAY_ADDRESS", None)
        ray.init(
            address="local",
            num_cpus=NUM_CPUS,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=object_store_bytes(),
            runtime_env={"py_executable": _server.python},
            _system_config={"worker_niceness": 0},
        )
        _server.start()


def end_shared_ray() -> None:
    """Ends it, so that what runs next starts a Ray of its own."""
    global _server
    ray.shutdown()
    if _server is not None:
        _server.end()
        _server = None


def _reserved_places() -> list[str]:
    groups = placement_group_table().items()
    return [group_id for group_id, group in groups if group["state"] != "REMOVED"]


def ended_with(exit_code: int | None, done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """Return a process that has ended, with this exit code or with any."""
    assert exit_code in (None, done.returncode), done.stdout + done.stderr
    return done


def called_here(
    words: Sequence[str], *, merged: bool = False, exit_code: int | None = 0
) -> subprocess.CompletedProcess[str]:
    """Exit code and output of a command, as of a process, that runs in this one.

    Args:
        words: What follows the program's name.
        merged: Errors stand among the output, in the order of time.
        exit_code: What it must end with. None for any.
    """
    output = StringIO()
    errors = output if merged else StringIO()
    with mock.patch.dict(os.environ, {"COLUMNS": "120"}):
        os.environ.pop("RAY_ADDRESS", None)
        with redirect_stdout(output), redirect_stderr(errors):
            try:
                code = main(words)
            except SystemExit as error:
                code = int(error.code or 0)
    printed = output.getvalue(), "" if merged else errors.getvalue()
    return ended_with(exit_code, subprocess.CompletedProcess(list(words), code, *printed))


def run_here(
    words: Sequence[str], folder: Path, *, merged: bool = False, exit_code: int | None = 0
) -> subprocess.CompletedProcess[str]:
    """Run a command that trains.

    Args:
        words: What follows the program's name.
        folder: The working folder; made where it is missing.
        merged: Errors stand among the output, in the order of time.
        exit_code: What it must end with. None for any.

    Returns:
        Exit code and output, as of a process.

    Raises:
        AssertionError: Another exit code, or NCCL would not have carried what the run's ranks have said to each other.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with chdir(folder):
        done = called_here(words, merged=merged, exit_code=None)
    # Where Ray lost the call, the worker has written no stack; its log is gone after the tests.
    for pid in re.findall(r"pid (\d+)\) has written no stack", done.stdout + done.stderr):
        logs = Path(ray._private.worker._global_node.get_logs_dir_path())
        for log in logs.glob(f"*_{pid}.log"):
            done.stderr += f"\n{log.name}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-40:])
    problems = _server.problems() if _server is not None else []
    # Ranks of a run that has failed were stopped wherever they were.
    assert done.returncode or not problems, "\n".join(problems)
    return ended_with(exit_code, done)
