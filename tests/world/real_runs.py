# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Small GRPO runs of the released model."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.real_demo.data import write_data
from examples.real_model import MOE
from tests.functional import sft_runs
from tests.support.loggers import MetricHistory, read_jsonl

EXEMPLAR = sft_runs.REPOSITORY_ROOT / "examples/configs/grpo_real_moe.yaml"
CLI = ("-m", "nemo_rl_moe.cli")


def train(folder: Path, *more: str, program: Sequence[str] = CLI, **changes: Any) -> MetricHistory:
    """Run two small steps of GRPO, in which the trainer replays the engine's routes, and return what they logged."""
    done = run(folder, *more, program=program, **changes)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return read_jsonl(sft_runs.only_run_folder(folder) / "metrics.jsonl")


def run(folder: Path, *more: str, program: Sequence[str] = CLI, **changes: Any) -> subprocess.CompletedProcess[str]:
    """Start such a run below a folder, and wait for its end.

    Args:
        more: Further overrides.
        program: Arguments of Python before `grpo`.
        changes: Keys; two underscores for a dot.
    """
    if not (folder / "data").is_dir():
        (folder / "data").mkdir(parents=True)
        write_data(folder / "data", seed=0)
    values: dict[str, Any] = {
        "policy.model_name": MOE,
        "grpo.num_prompts_per_step": 2,
        "grpo.num_generations_per_prompt": 4,
        "grpo.max_num_steps": 2,
        "grpo.use_dynamic_sampling": False,
        "grpo.val_period": 0,
        "policy.train_global_batch_size": 8,
        "policy.train_micro_batch_size": 4,
        "policy.logprob_batch_size": 8,
        "policy.megatron_cfg.routing_replay": "rollout",
        "policy.megatron_cfg.scheduler.lr_warmup_iters": 0,
        "env.reward.kind": "callable",
        "env.reward.function": "tests.support.rewards_of_tests:share_of_vowels",
        "data.train.path": folder / "data" / "grpo.jsonl",
        "data.validation": None,
        "checkpointing.checkpoint_dir": None,
        "logger.log_dir": folder / "logs",
        "cluster.cpu_workers_per_node": 1,
    }
    overrides = sft_runs.as_overrides(values, {**sft_runs.only_jsonl(), **changes})
    return subprocess.run(
        [sys.executable, *program, "grpo", "--config", str(EXEMPLAR), *overrides, *more],
        capture_output=True,
        text=True,
        env=sft_runs.environment(),
        cwd=folder,
        check=False,
    )
