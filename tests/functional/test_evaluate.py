# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`nemo-rl-moe evaluate` and `generate` on what a GRPO run leaves: the same responses, without training."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.functional import grpo_runs, sft_runs, shared_ray
from tests.support.loggers import read_jsonl

pytestmark = pytest.mark.shared_ray

NUM_PROMPTS, SAMPLES, THRESHOLD = 6, 4, 0.05
REWARD = {
    "env__reward__kind": "callable",
    "env__reward__function": "tests.functional.grpo_runs:share_of_digits",
    "grpo__val_num_generations": SAMPLES,
    "grpo__val_at_start": False,
}


@dataclass(frozen=True)
class Trained:
    """A run of one step.

    Attributes:
        data: The prompts.
        run_folder: What it wrote.
    """

    data: Path
    run_folder: Path

    @property
    def checkpoint(self) -> Path:
        """Its checkpoint."""
        return self.run_folder / "checkpoints" / "step_1"

    @property
    def final(self) -> Path:
        """Folder of the final weights in Hugging Face's form."""
        return self.run_folder / "checkpoints" / "final"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    data = grpo_runs.make_prompts(folder / "data", 8)
    changes = {**REWARD, **sft_runs.only_jsonl(), "grpo__max_num_steps": 1, "checkpointing__save_period": 1}
    grpo_runs.run_here(grpo_runs.settings(folder, data, **changes), folder)
    return Trained(data, sft_runs.only_run_folder(folder))


def evaluated(trained: Trained, folder: Path, *options: str) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """Results, samples and standard output of an evaluation of the checkpoint."""
    changes = {**REWARD, "policy__model_name": trained.checkpoint, "policy__init": "pretrained"}
    overrides = grpo_runs.settings(folder, trained.data, **changes)
    done = shared_ray.run_here(["evaluate", "--config", str(grpo_runs.EXEMPLAR), *options, *overrides], folder)
    assert done.stderr == ""
    (output,) = (folder / "logs").iterdir()
    assert output.name == "eval_001"
    samples = sft_runs.samples_of(output)
    return json.loads((output / "results.json").read_text()), samples, done.stdout


def test_a_checkpoint_is_evaluated_as_its_run_has_validated_it(trained: Trained, tmp_path: Path) -> None:
    results, samples, output = evaluated(trained, tmp_path, "--threshold", str(THRESHOLD))
    lines = (trained.run_folder / "samples.jsonl").read_text().splitlines()
    of_run = [record for line in lines if (record := json.loads(line))["split"] == "val"]
    assert len(samples) == NUM_PROMPTS * SAMPLES == len(of_run)
    same = ("sample_id", "prompt", "response", "reward", "is_correct")
    assert [[each[name] for name in same] for each in samples] == [[each[name] for name in same] for each in of_run]
    metrics = {key: pairs[-1][1] for key, pairs in read_jsonl(trained.run_folder / "metrics.jsonl").items()}
    assert results["metrics"]["val/reward"] == metrics["val/reward"] == pytest.approx(results["reward"]["mean"])
    # By hand, from what was written.
    passed = np.array([each["reward"] for each in samples]).reshape(NUM_PROMPTS, SAMPLES) >= THRESHOLD
    assert 0 < passed.mean() < 1
    shares = passed.mean(axis=1)
    assert results["accuracy"]["mean"] == pytest.approx(shares.mean())
    assert results["accuracy"]["standard_error"] == pytest.approx(shares.std(ddof=1) / NUM_PROMPTS**0.5)
    assert results["pass_at_k"].keys() == {"1", "2", "4"}
    assert results["pass_at_k"]["1"] == pytest.approx(results["accuracy"])
    assert results["pass_at_k"]["4"]["mean"] == pytest.approx(passed.any(axis=1).mean())
    assert results["num_prompts"] == NUM_PROMPTS
    assert f"  accuracy  {shares.mean():.4f} ± " in output
    assert "a response passes with a reward of at least 0.05" in output


def generated(
    trained: Trained, folder: Path, model: Path, *options: str
) -> tuple[list[dict[str, Any]], subprocess.CompletedProcess[str]]:
    """Records of responses to the held-out prompts with log-probabilities, and the command with its output."""
    prompts = str(trained.data / "validation_prompts.jsonl")
    words = ["generate", "--model", str(model), "--prompts", prompts, "--max-new-tokens", "6", "--logprobs", *options]
    done = shared_ray.run_here(words, folder)
    file = folder / "responses.jsonl"
    return [json.loads(line) for line in (file.read_text() if file.exists() else done.stdout).splitlines()], done


def logits_of_transformers(trained: Trained, record: dict[str, Any]) -> torch.Tensor:
    """Logits before each token of a response, `[tokens, vocabulary]`."""
    tokenizer: Any = AutoTokenizer.from_pretrained(trained.final)
    messages = [{"role": "user", "content": record["prompt"]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    model: Any = AutoModelForCausalLM.from_pretrained(trained.final, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([[*prompt, *record["token_ids"]]])).logits[0, len(prompt) - 1 : -1]
    return logits


@pytest.mark.slow
def test_greedy_responses_of_a_checkpoint_are_those_of_transformers(trained: Trained, tmp_path: Path) -> None:
    records, done = generated(trained, tmp_path, trained.checkpoint, "--temperature", "0")
    assert "generating 8 responses to 8 prompts: done" in done.stderr
    assert [record["sample_id"].rpartition(":")[2] for record in records] == [str(line) for line in range(1, 9)]
    for record in records:
        logits, answer = logits_of_transformers(trained, record), torch.tensor(record["token_ids"])
        assert torch.equal(logits.argmax(-1), answer)
        expected = logits.log_softmax(-1).gather(-1, answer[:, None])[:, 0].tolist()
        assert record["logprobs"] == pytest.approx(expected, abs=1e-5)
        assert record["num_tokens"] == len(answer) <= 6


@pytest.mark.full
def test_sampled_responses_go_into_a_file(trained: Trained, tmp_path: Path) -> None:
    options = ("--samples", "2", "--temperature", "0.7", "--seed", "7", "--output", "responses.jsonl")
    records, done = generated(trained, tmp_path, trained.final, *options)
    assert done.stdout == ""
    assert [record["sample"] for record in records] == [0, 1] * 8
    assert len({record["response"] for record in records}) > 8, "sampled, each with a seed of its own"
    record = records[5]
    logprobs = (logits_of_transformers(trained, record) / 0.7).log_softmax(-1)
    expected = logprobs.gather(-1, torch.tensor(record["token_ids"])[:, None])[:, 0].tolist()
    assert record["logprobs"] == pytest.approx(expected, abs=1e-5)
    assert [path.name for path in tmp_path.iterdir()] == ["responses.jsonl"]


def test_a_prompt_that_leaves_no_room_is_reported_before_a_worker_starts(trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("7+8=\n" + "9" * 400 + "\n")
    words = ["generate", "--model", str(trained.final), "--prompts", "prompts.txt"]
    done = shared_ray.run_here(words, tmp_path, exit_code=2)
    assert done.stdout == ""
    assert "starting" not in done.stderr
    assert done.stderr.splitlines()[-1] == (
        "error: --prompts: 1 of the prompts are longer than 256 tokens: a sequence has 512 tokens, of"
        " which 256 are for the response (policy.generation.max_new_tokens)"
    )
