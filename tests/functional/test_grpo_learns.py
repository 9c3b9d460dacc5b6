# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The demo from end to end: preferences and rewards make the fine-tuned model better, and a random reward does not."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional import sft_runs
from tests.support.loggers import MetricHistory, read_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

# What makes the reward a coin toss: the honest verdict stays in the accuracy.
CONTROL = (
    "env.reward.kind=callable",
    "env.reward.function=examples.random_reward:score",
    "env.reward.answer_after=null",
    "env.score_truncated=true",
)


def launch(folder: Path, algorithm: str, *overrides: str) -> None:
    """Runs the demo's exemplar in a folder of its own."""
    exemplar = sft_runs.REPOSITORY_ROOT / f"examples/configs/{algorithm}_tiny_moe.yaml"
    quiet = [f"logger.{name}=false" for name in sft_runs.JSONL_ONLY]
    command = [sys.executable, "-m", "nemo_rl_moe.cli", algorithm, "--config", str(exemplar), *quiet, *overrides]
    subprocess.run(command, cwd=folder, env=sft_runs.environment(), check=True, capture_output=True, timeout=900)


def history_of(folder: Path, name: str) -> MetricHistory:
    """Return what the only run of that name logged."""
    (run_folder,) = (folder / "logs" / name).iterdir()
    return read_jsonl(run_folder / "metrics.jsonl")


@pytest.fixture(scope="module")
def fine_tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the demo's first half has run."""
    folder = tmp_path_factory.mktemp("demo")
    script = sft_runs.REPOSITORY_ROOT / "examples/make_demo_data.py"
    subprocess.run([sys.executable, script, "--output", "data/addition", "--seed", "0"], cwd=folder, check=True)
    launch(folder, "sft", f"policy.model_name={sft_runs.MODEL}")
    return folder


def test_accuracy_rises_by_three_tenths(fine_tuned: Path) -> None:
    launch(fine_tuned, "grpo")
    history = history_of(fine_tuned, "grpo_tiny_moe")
    accuracy = [value for _, value in history["val/accuracy"]]
    assert accuracy[-1] - accuracy[0] > 0.3
    lengths = [value for _, value in history["val/mean_gen_tokens_per_sample"]]
    assert lengths[-1] > lengths[0] + 3  # what it learned is to show the working
    assert max(value for _, value in history["train/token_mult_prob_error"]) < 1 + 1e-6


def test_accuracy_of_preferences_rises_above_nine_tenths(fine_tuned: Path) -> None:
    launch(fine_tuned, "dpo")
    history = history_of(fine_tuned, "dpo_tiny_moe")
    accuracy = [value for _, value in history["val/accuracy"]]
    assert accuracy[0] == 0.0  # the model begins as its own reference: every margin is 0
    assert accuracy[-1] > 0.9
    margin = [value for _, value in history["val/reward_margin"]]
    assert margin[-1] > 0.5


def test_a_random_reward_teaches_nothing(fine_tuned: Path) -> None:
    launch(fine_tuned, "grpo", "logger.log_dir=logs/control", "checkpointing.enabled=false", *CONTROL)
    accuracy = [value for _, value in history_of(fine_tuned, "control")["val/accuracy"]]
    assert accuracy[-1] - accuracy[0] < 0.1
