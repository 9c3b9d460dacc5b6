# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs of a released model with experts: rollouts by a separate engine, replayed, each refit checked; and a resume."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from examples.real_demo.data import write_data
from examples.real_model import MOE
from nemo_rl_moe.config.schema_run import GENERATION_ROLE
from tests.functional import grpo_runs, sft_runs
from tests.support.logged_metrics import MetricHistory, read_jsonl

pytestmark = [
    pytest.mark.skipif(not MOE.is_dir(), reason=f"{MOE} is not there: make real-model writes it"),
    pytest.mark.timeout(1800),
]
EXEMPLAR = sft_runs.REPOSITORY_ROOT / "examples/configs/grpo_real_moe.yaml"


def train(folder: Path, *more: str, **changes: Any) -> MetricHistory:
    """Run two small steps of GRPO, in which the trainer replays the engine's routes, and return what they logged."""
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
        "env.reward.function": "tests.world.test_real_runs:share_of_vowels",
        "data.train.path": folder / "data" / "grpo.jsonl",
        "data.validation": None,
        "checkpointing.checkpoint_dir": None,
        "logger.log_dir": folder / "logs",
        "cluster.cpu_workers_per_node": 1,
    }
    overrides = sft_runs.as_overrides(values, {**sft_runs.only_jsonl(), **changes})
    done = subprocess.run(
        [*grpo_runs.command(overrides, EXEMPLAR), *more],
        capture_output=True,
        text=True,
        env=sft_runs.environment(),
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return read_jsonl(sft_runs.only_run_folder(folder) / "metrics.jsonl")


def share_of_vowels(item: Any) -> float:
    """Reward of which most groups have a spread."""
    return sum(letter in "aeiou" for letter in item.response) / max(1, len(item.response))


@pytest.fixture(scope="module")
def own_engine(tmp_path_factory: pytest.TempPathFactory) -> MetricHistory:
    """Two steps whose rollouts the trainer's workers generate."""
    return train(tmp_path_factory.mktemp("own"))


def without_times(history: MetricHistory) -> MetricHistory:
    return {key: values for key, values in history.items() if not key.startswith("timing/")}


def test_a_separate_engine_gives_the_same_run_and_its_refits_are_checked(
    own_engine: MetricHistory, tmp_path: Path
) -> None:
    role = f"+cluster.roles.{GENERATION_ROLE}={{}}"
    history = train(tmp_path, role, policy__generation__backend="megatron_separate")
    assert {value for _, value in own_engine["train/grad_norm"]} != {0.0}
    assert [value for _, value in own_engine["train/token_mult_prob_error"]] == pytest.approx([1.0, 1.0], abs=1e-4)
    shared = without_times(own_engine)
    assert {key: history[key] for key in shared} == shared
    assert history["train/refit/weights_compared"] == [(1, 1.0), (2, 1.0)]


def test_a_resumed_run_goes_on_to_the_bit(own_engine: MetricHistory, tmp_path: Path) -> None:
    """The run is as it was behind its first step: the later checkpoint and the final weights are removed."""
    folder = tmp_path / "checkpoints"
    kept = {
        "checkpointing__checkpoint_dir": folder,
        "checkpointing__save_period": 1,
        "checkpointing__save_optimizer": True,
        "checkpointing__keep_top_k": None,
    }
    whole = without_times(train(tmp_path, **kept))
    for name in ("step_2", "final"):
        shutil.rmtree(folder / name)
    history = without_times(train(tmp_path, **kept))
    shutil.rmtree(folder)  # gigabytes
    assert history == whole
    shared = without_times(own_engine)
    assert {key: history[key] for key in shared} == shared
