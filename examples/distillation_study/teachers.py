# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Teachers of the study of distillation: what GRPO leaves of the model that all runs begin with, and a control."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from examples.distillation_study.grid import SHUFFLED, TEACHER
from examples.studies.preparation import call_python
from nemo_rl_moe.checkpoints.store import FINAL_WEIGHTS_FOLDER

NUM_STEPS = 60
_OUTPUT_LAYER = "lm_head.weight"


def make_teachers(output: Path, data: Path, model: str) -> dict[str, Path]:
    """Return the folder of each kind of teacher; made once, and an interrupted training goes on.

    Raises:
        WorkerDiedError: The training failed.
    """
    place = output / "models" / "teacher"
    weights = place / "checkpoints" / FINAL_WEIGHTS_FOLDER
    if not (weights / "config.json").is_file():
        call_python(
            [
                *("-m", "nemo_rl_moe.cli", "grpo", "--config", "grpo_tiny_moe.yaml"),
                f"policy.model_name={model}",
                f"data.train.path={data / 'grpo.jsonl'}",
                f"data.validation.path={data / 'validation_prompts.jsonl'}",
                f"grpo.max_num_steps={NUM_STEPS}",
                "grpo.max_num_epochs=10",
                f"checkpointing.checkpoint_dir={weights.parent}",
                f"logger.log_dir={place / 'logs'}",
                *(f"logger.{name}_enabled=false" for name in ("tensorboard", "wandb", "mlflow")),
            ]
        )
    shuffled = output / "models" / SHUFFLED
    if not (shuffled / "config.json").is_file():
        shuffle_tokens(weights, shuffled)
    return {TEACHER: weights, SHUFFLED: shuffled}


def shuffle_tokens(teacher: Path, folder: Path, seed: int = 0) -> None:
    """Write a teacher that gives each token another one's probability, always the same one's."""
    # Checksums are the teacher's: of a folder without any, none are compared.
    shutil.copytree(teacher, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("config.json", "files.json"))
    (file,) = (path for path in folder.glob("*.safetensors") if _OUTPUT_LAYER in load_file(path))
    tensors = load_file(file)
    layer = tensors[_OUTPUT_LAYER]
    order = torch.randperm(len(layer), generator=torch.Generator().manual_seed(seed))
    save_file(tensors | {_OUTPUT_LAYER: layer[order].contiguous()}, file, metadata={"format": "pt"})
    shutil.copy(teacher / "config.json", folder)  # the last file: the folder is whole
