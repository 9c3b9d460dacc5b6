# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Short runs of each algorithm and of each kind of rollouts, whose metrics `tests/golden_curves.json` keeps.

Nothing here imports the package: `tests/make_golden_curves.py` runs other versions of it, too.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

USER_CODE = "golden_user_code"
"""The runs' user code, as a process finds it whose working folder has a copy."""
USER_CODE_HERE = f"tests.support.{USER_CODE}"
"""The same as a process finds it that has this repository on its path."""
_MODEL = "examples/assets/tiny_qwen3_moe"
# Metrics of each step; `timing/` is left out.
Curves = dict[str, dict[str, float]]
Settings = dict[str, object]


@dataclass(frozen=True)
class GoldenRun:
    """A run.

    Attributes:
        algorithm: Command of the program.
        settings: Returns the settings of the run; takes the empty folder for its data, the repository, and the module
            of the user code.
        num_steps: Training steps. After three, rounding of another processor makes sampled tokens differ.
    """

    algorithm: str
    settings: Callable[[Path, Path, str], Settings]
    num_steps: int = 3


def run_golden(name: str, folder: Path, repository: Path) -> Curves:
    """Return the metrics of a run that a process of its own makes.

    Args:
        name: One of `RUNS`.
        folder: Empty; data and logs go here.
        repository: Holds the package and the examples.
    """
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(repository), str(folder)]), "OMP_NUM_THREADS": "1"}
    shutil.copy(Path(__file__).with_name(f"{USER_CODE}.py"), folder)
    command = [sys.executable, "-m", "nemo_rl_moe.cli", *golden_words(name, folder, repository, USER_CODE)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)
    return curves_of(folder)


def golden_words(name: str, folder: Path, repository: Path, user_code: str = USER_CODE_HERE) -> list[str]:
    """Return the command's words after the program's name: two workers with the experts divided among them.

    Args:
        name: One of `RUNS`.
        folder: Empty, and the working folder of the command; gets the data.
        repository: Holds the package and the examples.
        user_code: Module of the user code.
    """
    run = RUNS[name]
    loop = run.algorithm if run.algorithm in ("sft", "dpo", "rm") else "grpo"
    common: Settings = {
        "policy.model_name": repository / _MODEL,
        "policy.init": "random",
        "policy.megatron_cfg.expert_model_parallel_size": 2,
        "policy.megatron_cfg.scheduler.lr_warmup_iters": 2,
        f"{loop}.max_num_steps": run.num_steps,
        f"{loop}.val_period": 2,
        "checkpointing.checkpoint_dir": "null",
        "logger.log_dir": "logs",
        "logger.tensorboard_enabled": "false",
        "logger.wandb_enabled": "false",
        "logger.mlflow_enabled": "false",
    }
    settings = common | run.settings(folder, repository, user_code)
    overrides = [f"{key}={value}" for key, value in settings.items()]
    config = repository / f"examples/configs/{run.algorithm}_tiny_moe.yaml"
    return [run.algorithm, "--config", str(config), *overrides]


def curves_of(folder: Path) -> Curves:
    """Return the metrics of the one run that logged below a folder, by step; without times, and without how far two
    passes agree about near ties, which is rounding itself."""
    (path,) = folder.glob("logs/*/metrics.jsonl")
    curves: Curves = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        metrics = {name: value for name, value in record["metrics"].items() if not _depends_on_time(name)}
        curves.setdefault(str(record["step"]), {}).update(metrics)
    return curves


def _depends_on_time(name: str) -> bool:
    return name.startswith(("timing/", "train/moe/routing/", "train/rollouts/")) or name.endswith("/tools/seconds")


def _additions(count: int, seed: int) -> list[tuple[int, int]]:
    generator = random.Random(seed)
    return [
        (generator.randrange(1, 10 ** generator.randrange(1, 4)), generator.randrange(1, 999)) for _ in range(count)
    ]


def _write(path: Path, count: int, seed: int, record: Callable[[int, int], dict[str, object]]) -> Path:
    path.write_text("".join(f"{json.dumps(record(a, b))}\n" for a, b in _additions(count, seed)))
    return path


def _sft(folder: Path, repository: Path, user_code: str) -> Settings:
    def record(a: int, b: int) -> dict[str, object]:
        return {"prompt": f"{a}+{b}=", "completion": str(a + b)}

    return {
        "data.train.path": _write(folder / "train.jsonl", 96, 1, record),
        "data.validation.path": _write(folder / "validation.jsonl", 19, 2, record),
        "policy.train_global_batch_size": 16,
        "policy.train_micro_batch_size": 4,
    }


def _dpo(folder: Path, repository: Path, user_code: str) -> Settings:
    def record(a: int, b: int) -> dict[str, object]:
        return {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": f"{a}{b}" + "0" * (a % 4)}

    return {
        "data.train.path": _write(folder / "train.jsonl", 48, 3, record),
        "data.validation.path": _write(folder / "validation.jsonl", 9, 4, record),
        "policy.train_global_batch_size": 8,
        "policy.train_micro_batch_size": 2,
    }


def _rm(folder: Path, repository: Path, user_code: str) -> Settings:
    def record(a: int, b: int) -> dict[str, object]:
        wrong = f"{a}{b}" + "0" * (a % 4)
        return {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": wrong, "margin": 0.25 * (a % 3)}

    return _dpo(folder, repository, user_code) | {
        "data.train.path": _write(folder / "scored.jsonl", 48, 3, record),
        "data.validation.path": _write(folder / "held_out.jsonl", 9, 4, record),
        "rm.center_rewards_coefficient": 0.01,
    }


def _grpo(folder: Path, repository: Path, user_code: str) -> Settings:
    def record(a: int, b: int) -> dict[str, object]:
        return {"prompt": f"{a}+{b}=", "answer": str(a + b), "metadata": {}}

    return {
        "data.train.path": _write(folder / "prompts.jsonl", 24, 5, record),
        "data.validation.path": _write(folder / "validation.jsonl", 6, 6, record),
        "env.reward.kind": "callable",
        "env.reward.function": f"{user_code}:share_of_digits",
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


def _asynchronous(folder: Path, repository: Path, user_code: str) -> Settings:
    return _grpo(folder, repository, user_code) | {
        "grpo.rollouts.mode": "asynchronous",
        "grpo.rollouts.order": "in_order",
        "grpo.rollouts.max_staleness": 0,
    }


def _dynamic(folder: Path, repository: Path, user_code: str) -> Settings:
    return _grpo(folder, repository, user_code) | {
        "env.reward.function": f"{user_code}:has_an_even_digit",
        "grpo.use_dynamic_sampling": "true",
        "grpo.max_num_epochs": 4,
    }


def _kl_cov(folder: Path, repository: Path, user_code: str) -> Settings:
    return _grpo(folder, repository, user_code) | {
        "env.reward.function": f"{user_code}:has_an_even_sum",
        "env.score_truncated": "true",
        "loss_fn.objective": "kl_cov",
        "loss_fn.cov_ratio": 0.2,
        "grpo.adv_estimator.name": "optimal_token_baseline",
        "grpo.adv_estimator.normalize_rewards": "false",
    }


def _dppo(folder: Path, repository: Path, user_code: str) -> Settings:
    return _grpo(folder, repository, user_code) | {
        "env.reward.function": f"{user_code}:has_an_even_sum",
        "env.score_truncated": "true",
        "loss_fn.objective": "dppo_tv",
        "loss_fn.ratio_clip_max": 0.0001,
        "loss_fn.importance_sampling_correction": "none",
        "grpo.adv_estimator.name": "maxrl",
        "grpo.adv_estimator.normalize_rewards": "false",
        "grpo.zero_variance_filtering": "true",
    }


def _ppo(folder: Path, repository: Path, user_code: str) -> Settings:
    return _grpo(folder, repository, user_code) | {
        "value.logprob_batch_size": 4,
        "value.model_name": make_moe_teacher(folder / "critic", repository / _MODEL),
        "value_loss_fn.cliprange": 0.5,
        "loss_fn.reference_policy_kl_penalty": 0.0,
    }


def _distillation(folder: Path, repository: Path, user_code: str) -> Settings:
    return _grpo(folder, repository, user_code) | {
        "distillation.teachers.teacher.model_name": make_moe_teacher(folder / "teacher", repository / _MODEL),
        "distillation.teachers.teacher.logprob_batch_size": 4,
        "loss_fn.reference_policy_kl_penalty": 0.0,
        "loss_fn.importance_sampling_correction": "none",
    }


def _function(folder: Path, repository: Path, user_code: str) -> Settings:
    return _grpo(folder, repository, user_code) | {
        "env.driver.kind": "function",
        "env.driver.function": f"{user_code}:ask_twice",
    }


def _any_text(folder: Path, repository: Path, user_code: str) -> Settings:
    """Return settings of a model whose vocabulary has any text."""
    return _grpo(folder, repository, user_code) | {
        "policy.model_name": repository / "examples/assets/tiny_qwen3_moe_tools",
        "policy.max_total_sequence_length": 1200,
        "policy.generation.max_new_tokens": 12,
        "env.score_truncated": "true",
    }


def _tools(folder: Path, repository: Path, user_code: str) -> Settings:
    return _any_text(folder, repository, user_code) | {
        # Some letters end a response.
        "policy.generation.stop_token_ids": str(list(range(0, 250, 8))).replace(" ", ""),
        "env.driver.kind": "tools",
        "env.driver.tools": f"[{user_code}:add]",
        "env.driver.format": f"{user_code}:ANY_TEXT",
        "env.driver.max_turns": 2,
        "env.driver.limits.num_workers": 2,
    }


def _agent(folder: Path, repository: Path, user_code: str) -> Settings:
    return _any_text(folder, repository, user_code) | {
        "env.driver.kind": "agent",
        "env.driver.program": f"{user_code}:agent",
        # A process for each trajectory: those that wait for one would join batches at times that differ.
        "env.driver.limits.num_workers": 8,
        "grpo.num_prompts_per_step": 2,
        "grpo.val_num_generations": 4,
        "grpo.max_val_samples": 2,
    }


RUNS = {
    "sft": GoldenRun("sft", _sft, num_steps=5),
    "dpo": GoldenRun("dpo", _dpo, num_steps=5),
    "rm": GoldenRun("rm", _rm, num_steps=5),
    "grpo": GoldenRun("grpo", _grpo),
    "kl_cov": GoldenRun("grpo", _kl_cov),
    "dppo": GoldenRun("grpo", _dppo),
    "ppo": GoldenRun("ppo", _ppo),
    "distillation": GoldenRun("distillation", _distillation),
    "function": GoldenRun("grpo", _function),
    "tools": GoldenRun("grpo", _tools),
    "agent": GoldenRun("grpo", _agent),
    "dynamic": GoldenRun("grpo", _dynamic),
    "asynchronous": GoldenRun("grpo", _asynchronous),
}


def make_moe_teacher(folder: Path, policy: Path, seed: int = 3, **changes: int) -> Path:
    """Write a model of the policy's shape with weights of its own.

    Args:
        changes: Fields of its configuration.
    """
    fields = json.loads((policy / "config.json").read_text()) | changes
    config = Qwen3MoeConfig(**fields | {"dtype": "float32", "tie_word_embeddings": False})
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        # A direction that all embeddings share: some tokens are likely whatever came before.
        model.model.embed_tokens.weight += 0.1 * torch.randn(config.hidden_size)
        model.lm_head.weight *= 4
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder)
    return folder
