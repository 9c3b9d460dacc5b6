# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`nemo-rl-moe evaluate` and `generate` with engines of vLLM beside the workers' own, on one checked set of weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional import grpo_runs, sft_runs
from tests.functional.served import NAME, make_model, serving
from tests.support.vllm_engines import vllm_tests

pytestmark = [*vllm_tests(900), pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with random weights that are large enough for greedy tokens to differ."""
    return make_model(tmp_path_factory.mktemp("model") / "model")


def ran(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command that a user types, and check that it succeeds."""
    return sft_runs.run_command([sys.executable, "-m", "nemo_rl_moe.cli", *words], folder, timeout=600)


def test_both_engines_give_the_same_greedy_tokens(model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("".join(f"{number}+{7 * number}=\n" for number in range(1, 13)))
    words = ["generate", "--model", str(model), "--prompts", "prompts.txt", "--max-new-tokens", "12", "--logprobs"]
    own, vllm = (
        [json.loads(line) for line in ran(tmp_path, *words, *more).stdout.splitlines()]
        for more in (["--temperature", "0"], ["--temperature", "0", "--backend", "vllm"])
    )
    assert [record["token_ids"] for record in vllm] == [record["token_ids"] for record in own]
    assert len({tuple(record["token_ids"]) for record in own}) > 6
    for mine, other in zip(own, vllm, strict=True):
        assert other["logprobs"] == pytest.approx(mine["logprobs"], abs=1e-4)
        assert (other["response"], other["finish_reason"]) == (mine["response"], mine["finish_reason"])


def test_greedy_evaluation_by_vllm_is_that_of_the_workers(model: Path, tmp_path: Path) -> None:
    data = grpo_runs.make_prompts(tmp_path / "data", 8)
    results = {}
    for backend in ("megatron", "vllm"):
        changes = {
            "policy__model_name": model,
            "policy__init": "pretrained",
            "policy__generation__backend": backend,
            "grpo__val_temperature": 0,
            "grpo__val_num_generations": 1,
            "env__reward__kind": "callable",
            "env__reward__function": "tests.functional.grpo_runs:share_of_digits",
            "cluster__cpu_workers_per_node": 1,
        }
        settings = grpo_runs.settings(tmp_path, data, **changes)
        done = ran(tmp_path, "evaluate", "--config", str(grpo_runs.EXEMPLAR), "--output", backend, *settings)
        results[backend] = json.loads((tmp_path / backend / "results.json").read_text())
    assert "sending the weights to the engine: done" in done.stdout
    assert results["vllm"]["reward"] == results["megatron"]["reward"]
    assert results["vllm"]["backend"] == "vllm"


def test_both_engines_serve_the_same_replies_scores_and_experts(model: Path, tmp_path: Path) -> None:
    prompts = ["7+8=", "1234+5678+90123="]
    found = []
    for backend in ("megatron_separate", "vllm"):
        with serving(model, tmp_path, "--backend", backend, "--max-model-len", "200") as server:
            reply = server.client().completions.create(
                model=NAME,
                prompt=prompts,
                echo=True,
                logprobs=1,
                max_tokens=8,
                temperature=0,
                extra_body={"return_routed_experts": True},
            )
            found.append(reply.model_dump()["choices"])
    for own, other in zip(*found, strict=True):
        assert own["text"] == other["text"]
        for scores in ("token_logprobs", "top_logprobs"):
            mine, vllms = ([_highest(each) for each in choice["logprobs"][scores][1:]] for choice in (own, other))
            assert vllms == pytest.approx(mine, abs=1e-4)
        mine, vllms = (choice["routed_experts"]["experts"][:-1] for choice in (own, other))
        assert [[sorted(layer) for layer in token] for token in vllms] == [
            [sorted(layer) for layer in token] for token in mine
        ]


def _highest(scores: float | dict[str, float]) -> float:
    return max(scores.values()) if isinstance(scores, dict) else scores
