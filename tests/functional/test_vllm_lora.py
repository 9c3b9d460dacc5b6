# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""GRPO runs that train adapters with rollouts by vLLM: merged weights arrive, and frozen ones are sent once."""

from pathlib import Path
from typing import Any

import pytest

from tests.functional import grpo_runs, run_kills, sft_runs
from tests.support.loggers import read_jsonl
from tests.support.vllm_engines import vllm_tests

pytestmark = vllm_tests(1200)

LIMIT_S = 800.0
NUM_STEPS = 3
ATTENTION = 4 * (2 * 128 * 128 + 2 * 64 * 128 + 2 * 32) * 4
"""Bytes of four layers' queries, keys, values, outputs and norms of heads."""
MLP = 4 * (8 * 3 * 128 * 128 + 8 * 128) * 4
"""Bytes of four layers' experts and routers."""
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "attention": ({"targets": ["q_proj", "v_proj"], "experts": "none"}, ATTENTION),
    "experts": ({"targets": ["down_proj"], "experts": "per_expert"}, MLP),
    "all": ({"targets": ["all-linear"], "experts": "per_expert"}, ATTENTION + MLP),
}
"""Settings of adapters, and the bytes of a later refit."""


def overrides(folder: Path, data: Path, **lora: Any) -> list[str]:
    """A run of some seconds a step that writes below `folder`."""
    return grpo_runs.settings(
        folder,
        data,
        policy__lora={
            "rank": 4,
            "alpha": 8.0,
            "use_rslora": False,
            "dropout": 0.0,
            "init": "kaiming",
            "path": None,
            **lora,
        },
        grpo__max_num_steps=NUM_STEPS,
        policy__megatron_cfg__optimizer__lr=0.01,
        checkpointing__enabled=False,
        env__reward__kind="callable",
        env__reward__function="tests.functional.grpo_runs:share_of_digits",
        **sft_runs.only_jsonl(),
    )


@pytest.mark.parametrize("case", CASES)
def test_merged_weights_arrive_in_each_step(case: str, tmp_path: Path) -> None:
    lora, num_bytes = CASES[case]
    data = grpo_runs.make_prompts(tmp_path / "prompts", 40)
    words = grpo_runs.command(
        overrides(tmp_path, data, **lora), grpo_runs.EXEMPLAR.with_name("grpo_tiny_moe_vllm.yaml")
    )
    with run_kills.running(words, tmp_path) as run:
        assert run.wait_for_end(LIMIT_S) == 0, run.printed + run.errors
    history = read_jsonl(sft_runs.only_run_folder(tmp_path) / "metrics.jsonl")
    assert max(value for _, value in history["train/refit/logprob_gap"]) < 2e-5
    assert {value for _, value in history["train/refit/checks_failed"]} == {0.0}
    assert {value for _, value in history["train/refit/weights_compared"]} == {1.0}
    for _, value in history["train/token_mult_prob_error"]:
        assert value == pytest.approx(1, abs=1e-5)
    assert {value for _, value in history["train/refit/bytes"]} == {num_bytes}


def test_vllm_gets_no_adapters(tmp_path: Path) -> None:
    data = grpo_runs.make_prompts(tmp_path / "prompts", 40)
    more = [*overrides(tmp_path, data, **CASES["all"][0]), "policy.generation.lora_refit=adapter"]
    words = grpo_runs.command(more, grpo_runs.EXEMPLAR.with_name("grpo_tiny_moe_vllm.yaml"))
    with run_kills.running(words, tmp_path) as run:
        assert run.wait_for_end(LIMIT_S) == 2
        assert "policy.generation.lora_refit: got adapter, expected merged" in run.errors
        assert "starting" not in run.printed
