# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What tests of whole GRPO runs share: prompts, settings, and the command that a user types."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from nemo_rl_moe.rewards.interface import ScoringItem
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.trajectory import Trajectory
from tests.functional import sft_runs, shared_ray
from tests.support.golden_user_code import ask_twice

EXEMPLAR = sft_runs.REPOSITORY_ROOT / "examples/configs/grpo_tiny_moe.yaml"


def make_prompts(folder: Path, num_prompts: int) -> Path:
    """Additions of numbers of one to three digits: prompts of different lengths. The held-out ones add 1 to each."""
    folder.mkdir(parents=True, exist_ok=True)
    sums = [
        (7 * index % 10 ** (1 + index % 3), 11 * index % 10 ** (1 + index // 3 % 3)) for index in range(num_prompts)
    ]
    for name, term, value in (("grpo", "", 0), ("validation_prompts", "+1", 1)):
        records = [{"prompt": f"{a}+{b}{term}=", "answer": str(a + b + value), "metadata": {}} for a, b in sums]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return folder


def settings(folder: Path, data: Path, **changes: Any) -> list[str]:
    """Overrides of the tiny exemplar for a short run from random weights that writes below `folder` and nowhere else.

    Args:
        folder: Gets the log folder `logs`.
        data: Holds `grpo.jsonl` and `validation_prompts.jsonl`.
        changes: Keys; two underscores for a dot.
    """
    values: dict[str, Any] = {
        "policy.model_name": sft_runs.MODEL,
        "policy.init": "random",
        "grpo.num_prompts_per_step": 4,
        "grpo.num_generations_per_prompt": 4,
        "grpo.max_num_steps": 3,
        "grpo.val_period": 2,
        "grpo.max_val_samples": 6,
        "grpo.val_num_generations": 2,
        "policy.train_global_batch_size": 16,
        "policy.train_micro_batch_size": 4,
        "policy.logprob_batch_size": 4,
        "policy.generation.max_new_tokens": 12,
        "policy.megatron_cfg.scheduler.lr_warmup_iters": 0,
        "data.train.path": data / "grpo.jsonl",
        "data.validation.path": data / "validation_prompts.jsonl",
        "logger.log_dir": folder / "logs",
        "checkpointing.checkpoint_dir": None,
    }
    return sft_runs.as_overrides(values, changes)


def reward_that_fails_at_times(item: ScoringItem) -> float:
    """An environment of a user's own: how many of the characters are digits. It cannot stand the digit 9."""
    if "9" in item.response:
        raise ValueError("a nine")
    return share_of_digits(item)


def share_of_digits(item: ScoringItem) -> float:
    """An environment of a user's own: how many of the characters are digits."""
    return sum(character.isdigit() for character in item.response) / 12


def digits_and_length(item: ScoringItem) -> dict[str, float]:
    """An environment of a user's own with three rewards by name. It cannot stand the digit 9."""
    return {
        "digits": reward_that_fails_at_times(item),
        "short": 1.0 - len(item.response) / 12,
        "even": float(len(item.response) % 2 == 0),
    }


HANG_FILE = "hang"
"""While a file of this name is in the working folder, `ask_twice_or_hang` does what it names."""


async def ask_twice_or_hang(session: Session) -> Trajectory:
    """`ask_twice`, with a tool that hangs, ends the process or takes all memory in one of four trajectories."""
    hang = Path(HANG_FILE)
    if session.seed % 4 == 0 and hang.exists():
        match hang.read_text():
            case "block":
                while True:
                    pass
            case "exits":
                os._exit(3)
            case "raises":
                sys.exit(3)
            case "allocates":
                _ = [bytearray(1 << 24) for _ in range(1 << 20)]
            case "thread":
                await asyncio.to_thread(time.sleep, 3600)
            case _:
                await asyncio.sleep(3600)
    return await ask_twice(session)


def command(overrides: list[str], exemplar: Path = EXEMPLAR) -> list[str]:
    """Return the command that a user types."""
    script = sft_runs.REPOSITORY_ROOT / "examples/run_grpo.py"
    return [sys.executable, str(script), "--config", str(exemplar), *overrides]


def run(overrides: list[str], cwd: Path, exit_code: int | None = 0) -> subprocess.CompletedProcess[str]:
    """Runs what a user types, to its end."""
    return sft_runs.run_command(command(overrides), cwd, exit_code=exit_code)


def run_here(overrides: list[str], folder: Path, **how: Any) -> subprocess.CompletedProcess[str]:
    """Runs the same in this process, on the Ray that tests share; `how` as for `shared_ray.run_here`."""
    return shared_ray.run_here(["grpo", "--config", str(EXEMPLAR), *overrides], folder, **how)
