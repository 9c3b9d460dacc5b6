# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Teachers of the study of distillation: the initial model after more fine-tuning, and a control."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from examples.distillation_study.grid import SHUFFLED, TEACHER
from examples.studies.preparation import fine_tuned
from nemo_rl_moe.atomic_writes import write_whole

EMPTY = "<think></think>"
_OVERRIDES = (
    "policy.init=pretrained",
    "policy.megatron_cfg.optimizer.lr=1.0e-3",
    "sft.max_num_steps=300",
    "sft.max_num_epochs=10",
)
_OUTPUT_LAYER = "lm_head.weight"


def make_teachers(output: Path, data: Path, model: str) -> dict[str, Path]:
    """Return the folder of each kind of teacher, which is made once. An interrupted training continues.

    Raises:
        WorkerDiedError: The training failed.
    """
    place = output / "models" / "teacher"
    samples = _with_working(data / "train.jsonl", place / "train.jsonl")
    settings = (f"data.train.path={samples}", *_OVERRIDES)
    weights = fine_tuned(place, data, "sft_tiny_moe.yaml", Path(model), settings)
    shuffled = output / "models" / SHUFFLED
    if not (shuffled / "config.json").is_file():
        shuffle_tokens(weights, shuffled)
    return {TEACHER: weights, SHUFFLED: shuffled}


def _with_working(samples: Path, path: Path) -> Path:
    """Write the samples with working in the completion, and return the file."""
    lines = samples.read_text(encoding="utf-8").splitlines(keepends=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(line for line in lines if EMPTY not in line))
    return path


def shuffle_tokens(teacher: Path, folder: Path, seed: int = 0) -> None:
    """Write a teacher that gives each token the probability of another one, by a fixed permutation."""
    # Without the checksums, which would not match.
    shutil.copytree(teacher, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("config.json", "files.json"))
    (file,) = (path for path in folder.glob("*.safetensors") if _OUTPUT_LAYER in load_file(path))
    tensors = load_file(file)
    layer = tensors[_OUTPUT_LAYER]
    order = torch.randperm(len(layer), generator=torch.Generator().manual_seed(seed))
    save_file(tensors | {_OUTPUT_LAYER: layer[order].contiguous()}, file, metadata={"format": "pt"})
    shutil.copy(teacher / "config.json", folder)  # last, to mark a complete folder
