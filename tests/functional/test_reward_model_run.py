# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs with a reward model: its scores are those of transformers in GRPO, PPO and evaluations; others are refused."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.functional import grpo_runs, sft_runs, shared_ray

pytestmark = pytest.mark.shared_ray

CONFIGS = sft_runs.REPOSITORY_ROOT / "examples/configs"
EXEMPLAR = CONFIGS / "grpo_tiny_moe_reward_model.yaml"
TP2 = {
    "reward_model.megatron_cfg.tensor_model_parallel_size": 2,
    "reward_model.megatron_cfg.sequence_parallel": True,
    "cluster.roles.reward_model.cpu_workers_per_node": 2,
}
PACKED = {"policy.sequence_packing.enabled": True, "policy.sequence_packing.train_mb_tokens": 128}
ALONE = {
    "env.reward.kind": "reward_model",
}


def make_classifier(folder: Path, num_labels: int = 1) -> Path:
    """Write a classifier of the policy's shape with random weights, whose scores differ."""
    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(sft_runs.MODEL)
    config.num_labels = num_labels
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.score.weight *= 20
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(sft_runs.MODEL).save_pretrained(folder)
    return folder


def make_policy(folder: Path) -> Path:
    """Write a model of tokens with random weights."""
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sft_runs.MODEL)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(sft_runs.MODEL).save_pretrained(folder)
    return folder


class Runs:
    """Runs of one configuration below a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.model = make_classifier(folder / "classifier")
        self.settings = grpo_runs.settings(
            folder,
            grpo_runs.make_prompts(folder / "data", 12),
            reward_model__model_name=self.model,
            reward_model__logprob_batch_size=4,
            grpo__max_num_steps=1,
            cluster__cpu_workers_per_node=1,
            **sft_runs.only_jsonl(),
        )

    def start(
        self, name: str, changes: dict[str, Any], command: str = "grpo", config: Path = EXEMPLAR, exit_code: int = 0
    ) -> Any:
        place = self.folder / name
        overrides = sft_runs.as_overrides({"logger.log_dir": place / "logs", **changes}, {})
        words = [command, "--config", str(config), *self.settings, *overrides]
        return shared_ray.run_here(words, place, exit_code=exit_code)

    def __call__(self, name: str, changes: dict[str, Any], **how: Any) -> Path:
        self.start(name, changes, **how)
        return sft_runs.only_run_folder(self.folder / name)

    def check_scores(self, run_folder: Path) -> list[dict[str, Any]]:
        """Compare the scores of samples with transformers'; return the samples."""
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        reference = AutoModelForSequenceClassification.from_pretrained(self.model, dtype=torch.float32).eval()
        samples = sft_runs.samples_of(run_folder)
        found: list[float] = []
        expected: list[float] = []
        for sample in samples:
            end = [] if sample["is_truncated"] else [tokenizer.eos_token_id]
            response = tokenizer.encode(sample["response"], add_special_tokens=False) + end
            if len(response) != sample["num_tokens"]:
                continue  # a text that does not say which tokens it was
            whole = tokenizer.encode(sample["prompt"], add_special_tokens=False) + response
            with torch.no_grad():
                expected.append(reference(torch.tensor([whole])).logits.item())
            found.append(sample["rewards"]["reward_model"])
        assert len(found) > len(samples) / 2
        assert np.std(expected) > 0.01
        # Scores reach 15 and cancel: float32 rounds by their size, not by that of the result.
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)
        return samples


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("reward model"))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("beside", {}),
        pytest.param("alone", {**ALONE, **TP2}, marks=pytest.mark.full),
        pytest.param("packed", PACKED, marks=pytest.mark.full),
        pytest.param("two copies", {"cluster.roles.reward_model.cpu_workers_per_node": 2}, marks=pytest.mark.full),
    ],
)
def test_scores_of_a_run_are_those_of_transformers(name: str, changes: Mapping[str, Any], runs: Runs) -> None:
    run_folder = runs(name, changes)
    samples = runs.check_scores(run_folder)
    for sample in samples:
        own = sample["reward"] - 0.1 * sample["rewards"]["reward_model"]
        assert own == pytest.approx(0 if "env.reward.kind" in changes else float(sample["is_correct"]), abs=1e-9)
    assert {sample["split"] for sample in samples} == {"train", "val"}
    (metrics,) = sft_runs.steps_of(run_folder)
    trained = [sample["rewards"]["reward_model"] for sample in samples if sample["split"] == "train"]
    assert metrics["train/rewards/reward_model/mean"] == pytest.approx(np.mean(trained))
    assert metrics["timing/reward_model/seconds"] > 0


@pytest.mark.full
def test_ppo_has_it_too(runs: Runs) -> None:
    config = runs.folder / "ppo.yaml"
    own = yaml.safe_load(EXEMPLAR.read_text())
    cluster = {"roles": {"critic": {"cpu_workers_per_node": 1}, **own["cluster"]["roles"]}}
    content = {"defaults": "ppo_tiny_moe.yaml", "reward_model": own["reward_model"], "cluster": cluster}
    config.write_text(yaml.safe_dump(content))
    changes = {"value.model_name": runs.model, "value.logprob_batch_size": 4, "ppo.gae_lambda": 1.0}
    run_folder = runs("ppo", changes, command="ppo", config=config)
    samples = runs.check_scores(run_folder)
    (metrics,) = sft_runs.steps_of(run_folder)
    # Without discount the return of a token is its response's whole reward, whatever the values are.
    rewards = [sample["reward"] for sample in samples if sample["split"] == "train"]
    assert metrics["train/critic/returns/max"] == pytest.approx(max(rewards), abs=1e-5)


@pytest.mark.full
def test_an_evaluation_has_the_same_rewards(runs: Runs) -> None:
    changes = {"policy.model_name": make_policy(runs.folder / "policy"), "policy.init": "pretrained"}
    output = runs("evaluated", changes, command="evaluate")
    samples = runs.check_scores(output)
    results = json.loads((output / "results.json").read_text())
    assert results["reward"]["mean"] == pytest.approx(np.mean([sample["reward"] for sample in samples]))


def test_what_cannot_be_a_reward_model_is_refused_in_one_line_before_ray(runs: Runs) -> None:
    shutil.copytree(runs.model, runs.folder / "other")
    path = runs.folder / "other" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    first, second, *_ = vocabulary
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(content))
    key, expected = "reward_model.model_name", "expected a ForSequenceClassification with one label"
    for model, line in (
        (make_policy(runs.folder / "tokens"), f"Qwen3MoeForCausalLM, {expected}"),
        (make_classifier(runs.folder / "three", 3), f"with 3 labels, {expected}"),
        (runs.folder / "other", "which has another vocabulary than"),
    ):
        refused = runs.start(f"refused {Path(model).name}", {key: model}, exit_code=2)
        (said,) = refused.stderr.splitlines()
        assert said.startswith(f"error: {key}: got {model}, ")
        assert line in said
        assert "starting 1 worker" not in refused.stdout
