# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs of one configuration that a file of tests starts by names, stops, and starts again."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.functional import sft_runs, shared_ray


class NamedRuns:
    """Runs of one configuration without validation, each in a folder of its name, on the Ray that tests share.

    Args:
        folder: Holds what all runs read.
        words: The command, up to its configuration file.
        settings: Overrides of all runs.
        section: That of `max_num_steps`.
        num_steps: Of a run for which no other number is given.
    """

    def __init__(self, folder: Path, words: Sequence[object], settings: list[str], section: str, num_steps: int):
        self.folder = folder
        self._words = [str(word) for word in words]
        self._words += [line for line in settings if not line.startswith("data.validation.path")]
        self._section, self._num_steps = section, num_steps

    def start(
        self, name: str, num_steps: int | None = None, changes: Mapping[str, Any] = {}, exit_code: int = 0
    ) -> "subprocess.CompletedProcess[str]":
        """Start the run, or go on with it."""
        values = {
            "logger.log_dir": self.folder / name / "logs",
            "checkpointing.checkpoint_dir": self.checkpoints(name),
            f"{self._section}.max_num_steps": num_steps or self._num_steps,
            **changes,
        }
        words = [*self._words, *sft_runs.as_overrides(values, {})]
        return shared_ray.run_here(words, self.folder / name, exit_code=exit_code)

    def __call__(self, name: str, num_steps: int | None = None, changes: Mapping[str, Any] = {}) -> str:
        """The same; return what was printed."""
        return self.start(name, num_steps, changes).stdout

    def run_folder(self, name: str) -> Path:
        return sft_runs.only_run_folder(self.folder / name)

    def steps(self, name: str) -> list[dict[str, float]]:
        return sft_runs.steps_of(self.run_folder(name))

    def learned(self, name: str) -> list[dict[str, float]]:
        """What each step has learned, without times."""
        return [{key: step[key] for key in step if key.startswith("train/")} for step in self.steps(name)]

    def checkpoints(self, name: str) -> Path:
        return self.folder / name / "checkpoints"
