# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Five short steps of each algorithm, whose metrics `tests/golden_curves.json` keeps.

Nothing here imports the package: `tests/make_golden_curves.py` runs other versions of it, too.
"""

import inspect
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ALGORITHMS = ("sft", "dpo", "grpo")
# Metrics of each step; `timing/` is left out.
Curves = dict[str, dict[str, float]]

_NUM_STEPS = 5
REWARD = "tests.support.golden_runs:share_of_digits"
"""The reward of GRPO's run as a process finds it that has imported this module's package from elsewhere."""


def share_of_digits(item: Any) -> float:
    """Return the part of a response that is digits, of eight."""
    return sum(character.isdigit() for character in item.response) / 8


def run_golden(algorithm: str, folder: Path, repository: Path) -> Curves:
    """Return the metrics of a run of five steps that a process of its own makes.

    Args:
        algorithm: One of `ALGORITHMS`.
        folder: Empty; data and logs go here.
        repository: Holds the package and the examples.
    """
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(repository), str(folder)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "nemo_rl_moe.cli", *golden_words(algorithm, folder, repository)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)
    return curves_of(folder)


def golden_words(algorithm: str, folder: Path, repository: Path) -> list[str]:
    """Return the command's words after the program's name: two workers with the experts divided among them.

    Args:
        algorithm: One of `ALGORITHMS`.
        folder: Empty, and the working folder of the command; gets the data.
        repository: Holds the package and the examples.
    """
    settings = {"sft": _sft, "dpo": _dpo, "grpo": _grpo}[algorithm](folder)
    common = {
        "policy.model_name": repository / "examples/assets/tiny_qwen3_moe",
        "policy.init": "random",
        "policy.megatron_cfg.expert_model_parallel_size": 2,
        "policy.megatron_cfg.scheduler.lr_warmup_iters": 2,
        f"{algorithm}.max_num_steps": _NUM_STEPS,
        f"{algorithm}.val_period": 2,
        "checkpointing.checkpoint_dir": "null",
        "logger.log_dir": "logs",
        "logger.tensorboard_enabled": "false",
        "logger.wandb_enabled": "false",
        "logger.mlflow_enabled": "false",
    }
    overrides = [f"{key}={value}" for key, value in {**common, **settings}.items()]
    return [algorithm, "--config", str(repository / f"examples/configs/{algorithm}_tiny_moe.yaml"), *overrides]


def curves_of(folder: Path) -> Curves:
    """Return the metrics of the one run that logged below a folder, by step; without times, and without how far two
    passes agree about near ties, which is rounding itself."""
    (path,) = folder.glob("logs/*/metrics.jsonl")
    curves: Curves = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        left_out = ("timing/", "train/moe/routing/")
        metrics = {name: value for name, value in record["metrics"].items() if not name.startswith(left_out)}
        curves.setdefault(str(record["step"]), {}).update(metrics)
    return curves


def _additions(count: int, seed: int) -> list[tuple[int, int]]:
    generator = random.Random(seed)
    return [
        (generator.randrange(1, 10 ** generator.randrange(1, 4)), generator.randrange(1, 999)) for _ in range(count)
    ]


def _write(path: Path, count: int, seed: int, record: Callable[[int, int], dict[str, object]]) -> Path:
    path.write_text("".join(f"{json.dumps(record(a, b))}\n" for a, b in _additions(count, seed)))
    return path


def _sft(folder: Path) -> dict[str, object]:
    def record(a: int, b: int) -> dict[str, object]:
        return {"prompt": f"{a}+{b}=", "completion": str(a + b)}

    return {
        "data.train.path": _write(folder / "train.jsonl", 96, 1, record),
        "data.validation.path": _write(folder / "validation.jsonl", 19, 2, record),
        "policy.train_global_batch_size": 16,
        "policy.train_micro_batch_size": 4,
    }


def _dpo(folder: Path) -> dict[str, object]:
    def record(a: int, b: int) -> dict[str, object]:
        return {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": f"{a}{b}" + "0" * (a % 4)}

    return {
        "data.train.path": _write(folder / "train.jsonl", 48, 3, record),
        "data.validation.path": _write(folder / "validation.jsonl", 9, 4, record),
        "policy.train_global_batch_size": 8,
        "policy.train_micro_batch_size": 2,
    }


def _grpo(folder: Path) -> dict[str, object]:
    def record(a: int, b: int) -> dict[str, object]:
        return {"prompt": f"{a}+{b}=", "answer": str(a + b), "metadata": {}}

    # Other versions of the package have another module of this name, or none.
    function = inspect.getsource(share_of_digits).replace(": Any", "")
    (folder / "golden_reward.py").write_text(function)
    return {
        "data.train.path": _write(folder / "prompts.jsonl", 24, 5, record),
        "data.validation.path": _write(folder / "validation.jsonl", 6, 6, record),
        "env.reward.kind": "callable",
        "env.reward.function": "golden_reward:share_of_digits",
        "grpo.num_prompts_per_step": 4,
        "grpo.num_generations_per_prompt": 4,
        "grpo.max_val_samples": 6,
        # Two updates a step: importance weights and ratios are those of a policy that has moved.
        "policy.train_global_batch_size": 8,
        "policy.train_micro_batch_size": 4,
        "policy.logprob_batch_size": 4,
        "policy.generation.max_new_tokens": 8,
        "loss_fn.reference_policy_kl_penalty": 0.05,
        "loss_fn.importance_sampling_correction": "truncated",
    }
