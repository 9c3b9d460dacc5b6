# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What tests of whole DPO runs share: pairs, settings, and the command that a user types."""

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.functional import sft_runs, shared_ray

EXEMPLAR = sft_runs.REPOSITORY_ROOT / "examples/configs/dpo_tiny_moe.yaml"


def make_pairs(folder: Path, num_train: int, num_validation: int) -> Path:
    """Small sums of different lengths, with the right answer and a longer wrong one."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": f"{a}{b}" + "0" * (a % 5)}
        for a, b in ((7 * index % 10 ** (1 + index % 3), 1 + 3 * index) for index in range(num_train + num_validation))
    ]
    sets = {"preferences": records[:num_train], "validation_preferences": records[num_train:]}
    for name, chosen in sets.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in chosen))
    return folder


def settings(folder: Path, data: Path, **changes: Any) -> list[str]:
    """Overrides of the tiny exemplar for a short run from random weights that writes below `folder` and nowhere else.

    Args:
        folder: Gets the log folder `logs`.
        data: Holds `preferences.jsonl` and `validation_preferences.jsonl`.
        changes: Keys; two underscores for a dot.
    """
    values: dict[str, Any] = {
        "policy.model_name": sft_runs.MODEL,
        "policy.init": "random",
        "dpo.max_num_steps": 4,
        "dpo.val_period": 2,
        "policy.train_global_batch_size": 8,
        "policy.train_micro_batch_size": 2,
        "policy.megatron_cfg.scheduler.lr_warmup_iters": 0,
        "data.train.path": data / "preferences.jsonl",
        "data.validation.path": data / "validation_preferences.jsonl",
        "logger.log_dir": folder / "logs",
        "checkpointing.checkpoint_dir": None,
    }
    return sft_runs.as_overrides(values, sft_runs.only_jsonl() | changes)


def run_here(overrides: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs what a user types, in this process and on the Ray that tests share."""
    return shared_ray.run_here(["dpo", "--config", str(EXEMPLAR), *overrides], folder)
