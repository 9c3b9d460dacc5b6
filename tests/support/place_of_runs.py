# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A place where runs have been, and others look for where to go on."""

import json
from pathlib import Path
from typing import Any

from nemo_rl_moe.checkpoints.resume import ResumePoint, find_resume_point
from nemo_rl_moe.config.loading import load_any_config
from tests.support.saving_run import Run

SHARED = "checkpointing.checkpoint_dir={}/shared"
NEVER = "checkpointing.resume=never"


class Place:
    """A log folder, and a folder of checkpoints that runs share."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.warnings: list[str] = []

    def overrides(self, *overrides: str, shared: bool) -> list[str]:
        """Return where this place is, and further overrides."""
        directory = SHARED.format(self.folder) if shared else "checkpointing.checkpoint_dir=null"
        return [f"logger.log_dir={self.folder / 'logs'}", directory, *overrides]

    def run_folder(self, number: int) -> Path:
        """Return where a run is."""
        return self.folder / "logs" / f"exp_{number:03d}"

    def run(self, number: int, *overrides: str, shared: bool = False, **changes: Any) -> Run:
        """Return a run in a folder of its own."""
        run_folder = self.run_folder(number)
        run_folder.mkdir(parents=True, exist_ok=True)
        (run_folder / "config.yaml").write_text("")
        (run_folder / "run.json").write_text(json.dumps({"run_id": changes.get("first_run_id", "run-a")}))
        return Run(run_folder, *self.overrides("checkpointing.keep_top_k=null", *overrides, shared=shared), **changes)

    def find(
        self,
        *overrides: str,
        run_id: str = "new",
        restart: int = 0,
        shared: bool = False,
        name: str = "sft_tiny_moe.yaml",
    ) -> ResumePoint | None:
        """Return where a run would start."""
        self.warnings.clear()
        config = load_any_config(name, self.overrides(*overrides, shared=shared), check_paths=False)
        return find_resume_point(config, run_id, restart, self.warnings.append)

    def found(self, *overrides: str, **arguments: Any) -> ResumePoint:
        """Return where a run goes on."""
        point = self.find(*overrides, **arguments)
        assert point is not None
        return point


def saved(run: Run, *steps: int) -> Run:
    """Return the run, after it has saved at these steps."""
    for step in steps:
        run.save(step)
    return run
