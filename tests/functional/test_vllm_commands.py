# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`nemo-rl-moe evaluate` and `generate` with engines of vLLM beside the workers' own, on one checked set of weights."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.functional import grpo_runs, sft_runs
from tests.support.vllm_engines import vllm_tests

pytestmark = [*vllm_tests(900), pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with random weights that are large enough for greedy tokens to differ."""
    folder = tmp_path_factory.mktemp("model") / "model"
    torch.manual_seed(3)
    made: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sft_runs.MODEL), dtype=torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    made.save_pretrained(folder)
    AutoTokenizer.from_pretrained(sft_runs.MODEL).save_pretrained(folder)
    return folder


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
