# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Logs steps to every backend in a process of its own, as one attempt of a run: python resumed_run.py FOLDER ...

The last argument says how it ends: `close`, `raise`, or with SIGKILL, `kill at once` or `kill` when the backends have
all steps.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from nemo_rl_moe.runs.loggers.console import ConsoleLogger
from nemo_rl_moe.runs.loggers.factory import LoggerResume, build_loggers
from nemo_rl_moe.runs.loggers.rewind import rewind_run_folder
from tests.support.loggers import settings_for


def metrics_of(step: int, attempt: int) -> dict[str, float]:
    """The metrics of a step; `train/attempt` says which attempt has logged it."""
    metrics = {"train/loss": 1 / 2**step, "train/attempt": float(attempt)}
    return metrics | ({"val/loss": 1 / 4**step} if step % 2 == 0 else {})


def main(run_folder: Path, attempt: int, first: int, last: int, end: str) -> None:
    """Logs the steps `first` to `last`; goes on with the run where `first` is not 1."""
    ids_file = run_folder / "ids.json"
    resume = None
    if first > 1:
        rewind_run_folder(run_folder, first - 1)
        resume = LoggerResume(first - 1, json.loads(ids_file.read_text()))
    console = ConsoleLogger(10)
    settings = settings_for(run_folder.parent, "tensorboard", "wandb", "mlflow")
    with build_loggers(settings, run_folder, console, resume) as loggers:
        loggers.log_config({"attempt": attempt, "sft": {"max_num_steps": 10}})
        ids_file.write_text(json.dumps(loggers.run_ids))
        for step in range(first, last + 1):
            loggers.log_step(step, metrics_of(step, attempt))
        if end == "raise":
            raise RuntimeError("training broke")
        if end == "kill":
            while any(isolated._waiting or isolated._busy for isolated in loggers._isolated):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        if end == "kill at once":
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[5])
