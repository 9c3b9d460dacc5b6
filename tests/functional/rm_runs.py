# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What tests of whole runs that train a reward model share: settings, and the command that a user types."""

import subprocess
from pathlib import Path
from typing import Any

from tests.functional import dpo_runs, sft_runs, shared_ray

EXEMPLAR = sft_runs.REPOSITORY_ROOT / "examples/configs/rm_tiny_moe.yaml"


def settings(folder: Path, data: Path, **changes: Any) -> list[str]:
    """Overrides of the tiny exemplar for a short run from random weights that writes below `folder` and nowhere else.

    Arguments as of `dpo_runs.settings`.
    """
    of_dpo = dpo_runs.settings(folder, data, **changes)
    return [override.replace("dpo.", "rm.", 1) if override.startswith("dpo.") else override for override in of_dpo]


def run_here(overrides: list[str], folder: Path, **how: Any) -> subprocess.CompletedProcess[str]:
    """Runs what a user types, in this process and on the Ray that tests share."""
    return shared_ray.run_here(["rm", "--config", str(EXEMPLAR), *overrides], folder, **how)
