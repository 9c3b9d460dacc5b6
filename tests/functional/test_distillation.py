# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""An algorithm that lives outside of the package: on-policy distillation from a larger, dense teacher."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from nemo_rl_moe.runs.folder.run_data import RunData, read_run
from tests.functional import grpo_runs, sft_runs, shared_ray

pytestmark = pytest.mark.slow

EXAMPLE = sft_runs.REPOSITORY_ROOT / "examples/algorithms"
NUM_STEPS = 24
NUM_FURTHER_STEPS = 2
CHANGES = {
    "grpo.max_num_steps": NUM_STEPS,
    "grpo.max_num_epochs": 6,
    "grpo.num_prompts_per_step": 8,
    "grpo.num_generations_per_prompt": 8,
    "policy.model_name": str(sft_runs.MODEL),
    "policy.init": "random",
    "policy.train_global_batch_size": 64,
    "policy.train_micro_batch_size": 32,
    "policy.logprob_batch_size": 32,
    "policy.generation.max_new_tokens": 8,
    "policy.megatron_cfg.optimizer.lr": 3.0e-3,
    "policy.megatron_cfg.optimizer.min_lr": 3.0e-3,
    "policy.megatron_cfg.scheduler.lr_warmup_iters": 0,
    "checkpointing.save_period": 0,
    "logger.wandb_enabled": False,
    "logger.mlflow_enabled": False,
    "logger.tensorboard_enabled": False,
}


def make_teacher(folder: Path) -> None:
    """A dense model, deeper and wider than the policy, with the same tokenizer and with preferences to learn."""
    tokenizer = AutoTokenizer.from_pretrained(sft_runs.MODEL)
    policy = json.loads((sft_runs.MODEL / "config.json").read_text())
    config = Qwen3Config(
        num_hidden_layers=6,
        hidden_size=192,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        vocab_size=policy["vocab_size"],
        initializer_range=0.06,
        tie_word_embeddings=False,
        eos_token_id=policy["eos_token_id"],
        pad_token_id=policy["pad_token_id"],
        dtype="float32",
    )
    torch.manual_seed(3)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        # A direction that all embeddings share: some tokens are likely whatever came before.
        model.model.embed_tokens.weight += 0.1 * torch.randn(config.hidden_size)
        model.lm_head.weight *= 2
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def command(folder: Path, name: str, *overrides: str, exit_code: int = 0) -> "subprocess.CompletedProcess[str]":
    """Run the command that a user types, in the folder of the algorithm's module."""
    words = [sys.executable, "-m", "nemo_rl_moe.cli", name, "--config", "opd.yaml", *overrides]
    return sft_runs.run_command(words, folder, exit_code=exit_code)


def only_run(folder: Path) -> RunData:
    (run_folder,) = (folder / "logs/opd").iterdir()
    return read_run(run_folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the example, a teacher and prompts, and the settings of a small run in the file."""
    folder = tmp_path_factory.mktemp("opd")
    shutil.copy(EXAMPLE / "on_policy_distillation.py", folder)
    shutil.copy(EXAMPLE / "opd.yaml", folder / "example.yaml")
    make_teacher(folder / "teacher")
    grpo_runs.make_prompts(folder / "data/addition", 40)
    content: dict[str, object] = {"defaults": "example.yaml"}
    for key, value in CHANGES.items():
        section = content
        *path, name = key.split(".")
        for part in path:
            section = section.setdefault(part, {})  # type: ignore[assignment]
        section[name] = value
    (folder / "opd.yaml").write_text(yaml.safe_dump(content))
    return folder


@pytest.fixture(scope="module")
def finished(folder: Path) -> Path:
    done = command(folder, "run")
    assert "starting 1 worker of the teacher" in done.stdout
    return folder


def test_the_reverse_divergence_from_the_teacher_falls(finished: Path) -> None:
    run = only_run(finished)
    assert (run.algorithm, run.planned_steps, run.last_step) == ("opd", NUM_STEPS, NUM_STEPS)
    divergence = run.metrics["train/reverse_kl"].values
    first, last = float(np.mean(divergence[:3])), float(np.mean(divergence[-3:]))
    assert first > 0.3, "the teacher and the policy begin apart"
    assert last < 0.4 * first, divergence
    assert {"train/reward", "train/moe/load_balancing_loss", "timing/teacher_logprobs/seconds"} <= run.metrics.keys()


def test_it_goes_on_from_its_checkpoint(finished: Path) -> None:
    state = json.loads((finished / f"results/opd/step_{NUM_STEPS}/state.json").read_text())
    assert state["algorithm"] == "opd"
    refused = command(finished, "run", "opd.teacher.model_name=data", "grpo.seed=5", exit_code=2)
    assert refused.stderr == "error: opd.teacher.model_name: the folder data holds no config.json\n"
    refused = command(
        finished, "run", "grpo.seed=5", f"grpo.max_num_steps={NUM_STEPS + NUM_FURTHER_STEPS}", exit_code=2
    )
    assert "error: grpo.seed: got 5, but " in refused.stderr
    done = command(finished, "run", f"grpo.max_num_steps={NUM_STEPS + NUM_FURTHER_STEPS}")
    assert f"going on from results/opd/step_{NUM_STEPS}: {NUM_STEPS} of" in done.stdout
    assert only_run(finished).last_step == NUM_STEPS + NUM_FURTHER_STEPS


def test_a_teacher_of_text_cannot_read_the_batches_of_a_policy_that_sees(folder: Path) -> None:
    sees = str(sft_runs.MODEL.with_name("tiny_internvl_moe"))
    prompts = [{"prompt": f"how many shapes ? {number}", "answer": number, "metadata": {}} for number in "1234"]
    (folder / "shapes.jsonl").write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
    changes = ["data.train.path=shapes.jsonl", "grpo.num_prompts_per_step=2", "policy.train_global_batch_size=16"]
    changes += ["policy.train_micro_batch_size=8", "checkpointing.checkpoint_dir=null"]
    refused = command(folder, "run", f"policy.model_name={sees}", *changes, exit_code=2)
    assert refused.stderr.splitlines()[-1] == (
        "error: opd.teacher.model_name: got ./teacher, which takes text alone, expected a model that reads the "
        f"batches of policy.model_name {sees} as they are"
    )
    assert "starting Ray" not in refused.stdout


def test_report_config_and_plan_know_it(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(finished)
    monkeypatch.chdir(finished)
    printed = shared_ray.called_here(["config", "--config", "opd.yaml"])
    assert printed.stdout.startswith("algorithm: on_policy_distillation:ALGORITHM\nopd:\n")
    shared_ray.called_here(["plan", "--config", "opd.yaml"])
    changes = ["policy.generation.top_p=0.5", "~cluster.roles.teacher"]
    wrong = shared_ray.called_here(["config", "--config", "opd.yaml", *changes], exit_code=2)
    assert "error: policy.generation: on-policy distillation needs temperature 1" in wrong.stderr
    assert "error: cluster.roles.teacher: missing" in wrong.stderr
