# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What tests of whole runs with images share: the data, and what makes the demo with images short."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.functional import sft_runs

MODEL = sft_runs.REPOSITORY_ROOT / "examples/assets/tiny_internvl_moe"
SFT_EXEMPLAR, GRPO_EXEMPLAR = (
    sft_runs.REPOSITORY_ROOT / f"examples/configs/vlm_{name}_tiny_moe.yaml" for name in ("sft", "grpo")
)


def make_shapes(folder: Path) -> Path:
    """A few images of coloured shapes, with questions."""
    script = sft_runs.REPOSITORY_ROOT / "examples/make_shapes_data.py"
    sizes = ["--num-train", "96", "--num-validation", "8", "--num-grpo-prompts", "40"]
    command = [sys.executable, str(script), "--output", str(folder), *sizes]
    subprocess.run(command, check=True, capture_output=True, timeout=540)
    return folder


def grpo_changes(shapes: Path) -> dict[str, Any]:
    """Keys of a short GRPO run, for `grpo_runs.settings`."""
    return {
        "policy__model_name": MODEL,
        "policy__generation__max_new_tokens": 4,
        "data__train__path": shapes / "grpo_train.jsonl",
        "data__validation__path": shapes / "grpo_validation.jsonl",
    }
