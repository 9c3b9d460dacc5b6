# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""GRPO runs that train adapters with rollouts by vLLM: merged weights or adapters arrive, and the base is sent once."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.functional import grpo_runs, run_kills, sft_runs
from tests.support.delta_net_models import MODELS, OF_THE_TOKENIZER
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


ALONE = {"targets": ["all-linear"], "experts": "none"}


def adapter_run(folder: Path, *more: str, **lora: Any) -> list[str]:
    """Return the command of a run whose engine applies the adapters."""
    data = grpo_runs.make_prompts(folder / "prompts", 40)
    refit = "policy.generation.lora_refit=adapter"
    exemplar = grpo_runs.EXEMPLAR.with_name("grpo_tiny_moe_vllm.yaml")
    return grpo_runs.command([*overrides(folder, data, **lora), refit, *more], exemplar)


@pytest.mark.parametrize(
    ("lora", "line"),
    [
        (CASES["all"][0], "policy.lora.experts: got per_expert, expected none with policy.generation.backend vllm"),
        (ALONE | {"rank": 513}, "policy.lora.rank: got 513, expected at most 512 with policy.generation.backend vllm"),
    ],
)
def test_adapters_that_vllm_cannot_apply_are_refused_before_anything_starts(
    lora: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with run_kills.running(adapter_run(tmp_path, **lora), tmp_path) as run:
        assert run.wait_for_end(LIMIT_S) == 2
        assert line in run.errors
        assert "starting" not in run.printed


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3.5-MoE with random weights and the tiny tokenizer."""
    folder = tmp_path_factory.mktemp("hybrid") / "model"
    shutil.copytree(sft_runs.MODEL, folder)
    name = "qwen3_5_moe_text"
    config = AutoConfig.for_model(name, **{**MODELS[name], **OF_THE_TOKENIZER})
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def test_a_hybrid_model_is_trained_with_adapters_that_the_engine_applies(hybrid: Path, tmp_path: Path) -> None:
    more = sft_runs.as_overrides(
        {
            "policy.model_name": hybrid,
            "policy.init": "pretrained",
            "policy.generation.vllm.dtype": "bfloat16",
            "policy.megatron_cfg.routing_replay": "rollout",
            "checkpointing.enabled": True,
            "checkpointing.checkpoint_dir": tmp_path / "checkpoints",
        },
        {},
    )
    command = adapter_run(tmp_path, *more, **ALONE)
    sft_runs.run_command(command, tmp_path)
    history = read_jsonl(sft_runs.only_run_folder(tmp_path) / "metrics.jsonl")
    assert {value for _, value in history["train/refit/weights_compared"]} == {1.0}
    assert {value for _, value in history["train/refit/checks_failed"]} == {0.0}
    assert {value for _, value in history["train/moe/routing/rows_usable_share"]} == {1.0}
    final = tmp_path / "checkpoints" / "final"
    adapter = load_file(final / "adapter" / "adapter_model.safetensors")
    assert any(factor.any() for name, factor in adapter.items() if "lora_B" in name)
    num_bytes = 4 * sum(factor.numel() for factor in adapter.values())
    assert {value for _, value in history["train/refit/bytes"]} == {num_bytes}, "the adapter alone"
    ids = torch.arange(3, 27)[None]
    base = AutoModelForCausalLM.from_pretrained(hybrid, dtype=torch.float32)
    with torch.no_grad():
        before = base(ids).logits
        by_peft = PeftModel.from_pretrained(base, str(final / "adapter"))(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32)(ids).logits
    assert (by_peft - before).abs().max() > 1e-3
    torch.testing.assert_close(by_peft, merged, atol=1e-5, rtol=1e-5)
