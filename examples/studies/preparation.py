# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Preparation of a study: data of a demo, and a model that this package's commands fine-tune on them."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_rl_moe.checkpoints.store import FINAL_WEIGHTS_FOLDER
from nemo_rl_moe.errors import WorkerDiedError

REPOSITORY_ROOT = Path(__file__).resolve().parents[2]
TINY_MODEL = REPOSITORY_ROOT / "examples" / "assets" / "tiny_qwen3_moe"
CALCULATOR_MODEL = REPOSITORY_ROOT / "examples" / "assets" / "tiny_qwen3_moe_calculator"

DEEP_MODEL = {"num_hidden_layers": 12, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
"""Changes to the tiny model's `config.json` for the deep model."""
SFT_OVERRIDES = {
    "small": (),
    "deep": ("policy.megatron_cfg.optimizer.lr=2.0e-3",),
}
"""Overrides of `sft_tiny_moe.yaml`."""


def make_data(output: Path) -> Path:
    """Return the folder of the demo's sums, which is made once."""
    folder = output / "data"
    call_python([str(REPOSITORY_ROOT / "examples" / "make_demo_data.py"), "--output", str(folder), "--seed", "0"])
    return folder


def make_model(model: str, output: Path, data: Path) -> Path:
    """Return the folder of the initial model of all runs, which is trained once. An interrupted training continues.

    Raises:
        WorkerDiedError: The training failed.
    """
    place = output / "models" / model
    return fine_tuned(place, data, "sft_tiny_moe.yaml", _config_folder(model, place), SFT_OVERRIDES[model])


def calculator_data(output: Path) -> Path:
    """Return the folder of the tool demo's questions, which is made once."""
    folder = output / "data"
    if not (folder / "manifest.json").is_file():  # the last file
        call_python(["-m", "examples.tools_demo.data", "--output", str(folder)])
    return folder


def calculator_model(output: Path, data: Path) -> Path:
    """Return the folder of a model that can call a calculator, which is trained once.

    Raises:
        WorkerDiedError: The training failed.
    """
    return fine_tuned(output / "models" / "calculator", data, "sft_tiny_moe_tools.yaml", CALCULATOR_MODEL)


def fine_tuned(place: Path, data: Path, config: str, model: Path, overrides: Sequence[str] = ()) -> Path:
    """Fine-tune a model, or continue, and return the folder of its last weights.

    Args:
        place: Folder of its checkpoints and logs.
        data: Folder of the training and validation samples.
        config: Recipe of supervised fine-tuning.
        model: Folder of the initial model.
        overrides: Settings with the highest priority.

    Raises:
        WorkerDiedError: The training failed.
    """
    weights = place / "checkpoints" / FINAL_WEIGHTS_FOLDER
    if (weights / "config.json").is_file():
        return weights
    call_python(
        [
            *("-m", "nemo_rl_moe.cli", "sft", "--config", config),
            f"policy.model_name={model}",
            f"data.train.path={data / 'train.jsonl'}",
            f"data.validation.path={data / 'validation.jsonl'}",
            f"checkpointing.checkpoint_dir={weights.parent}",
            f"logger.log_dir={place / 'logs'}",
            *(f"logger.{name}_enabled=false" for name in ("tensorboard", "wandb", "mlflow")),
            *overrides,
        ]
    )
    return weights


def _config_folder(model: str, place: Path) -> Path:
    """Return the folder with the model's `config.json` and tokenizer."""
    if model == "small":
        return TINY_MODEL
    folder = place / "config"
    shutil.copytree(TINY_MODEL, folder, dirs_exist_ok=True)
    fields = json.loads((TINY_MODEL / "config.json").read_text(encoding="utf-8")) | DEEP_MODEL
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    return folder


def call_python(words: list[str]) -> None:
    """Run a Python program, whose output the user sees."""
    code = subprocess.run([sys.executable, *words], cwd=REPOSITORY_ROOT, check=False).returncode
    if code != 0:
        raise WorkerDiedError(f"{' '.join(words[:3])} ended with exit code {code}")
