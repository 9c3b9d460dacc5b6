# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules of `policy.megatron_cfg.mtp_num_layers`, each broken once; and models whose layers cannot be trained."""

from typing import Any

import pytest

from nemo_rl_moe.config.loading import load_config, load_grpo_config
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.megatron.model.transformer_config import num_trained_mtp_layers
from tests.support.family_models import FAMILY_MODELS
from tests.support.tiny_model import tiny_policy
from tests.unit.config.conftest import Problems
from tests.unit.config.test_checks_lora import lora

M = "policy.megatron_cfg"
ON = f"{M}.mtp_num_layers=1"
GOT = f"{M}.mtp_num_layers: got 1, expected null with"
PIPELINE = f"{M}.pipeline_model_parallel_size=2"


@pytest.mark.parametrize(
    ("overrides", "line"),
    {
        (lora(),): f"{GOT} policy.lora, which trains adapters only",
        (
            "policy.shared_prefix=auto",
            "policy.sequence_packing.enabled=true",
        ): f"{GOT} policy.shared_prefix auto: a shared token has several next tokens",
        (
            PIPELINE,
            f"{M}.virtual_pipeline_model_parallel_size=2",
        ): f"{GOT} {M}.virtual_pipeline_model_parallel_size 2, which is not supported",
        (
            PIPELINE,
            f"{M}.mtp_detach_heads=false",
        ): f"{M}.mtp_detach_heads: got false, expected true with {M}.pipeline_model_parallel_size 2: the last stage has"
        " only a copy of the embedding",
        (
            f"{M}.model_overrides={{gradient_accumulation_fusion: true}}",
            f"{M}.mtp_detach_heads=false",
        ): f"{M}.mtp_detach_heads: got false, expected true with {M}.model_overrides.gradient_accumulation_fusion true,"
        " which leaves out the output layer's gradient of these layers",
    }.items(),
)
def test_a_broken_rule_is_one_line(problems_of: Problems, overrides: tuple[str, ...], line: str) -> None:
    assert problems_of(ON, *overrides) == [line]


def test_ranks_that_share_sequences_are_refused(problems_of: Problems) -> None:
    found = problems_of(ON, f"{M}.context_parallel_size=2")
    assert f"{GOT} {M}.context_parallel_size 2: the next token may be on another rank" in found


def test_pairs_are_refused(dpo_problems_of: Problems) -> None:
    assert dpo_problems_of(ON) == [f"{GOT} the algorithm dpo: the layers would learn the rejected responses too"]


def test_layers_that_fit_are_no_problem() -> None:
    for overrides in ([f"{M}.mtp_detach_heads=false"], [PIPELINE]):
        assert load_config("sft_tiny_moe.yaml", [ON, *overrides], check_paths=False).policy.megatron_cfg.mtp_num_layers
    assert load_grpo_config("grpo_tiny_moe.yaml", [ON], check_paths=False).policy.megatron_cfg.mtp_num_layers == 1


@pytest.mark.parametrize(
    ("name", "fields", "wanted", "problem"),
    [
        ("deepseek_v3", {"num_nextn_predict_layers": 1}, 1, None),
        ("deepseek_v3", {"num_nextn_predict_layers": 1}, None, None),
        (
            "deepseek_v3",
            {"num_nextn_predict_layers": 0},
            1,
            "got 1, expected null: the model's config.json declares 0 layers",
        ),
        ("deepseek_v3", {"num_nextn_predict_layers": 1}, 2, "got 2, expected 1 or null: the model's config.json"),
        ("deepseek_v3", {"num_nextn_predict_layers": 3}, 3, "got 3, expected null: the model's config.json"),
        ("qwen3_next", {}, 1, None),
        ("minimax_m2", {"num_mtp_modules": 1}, 1, "got 1, expected null for MiniMax-M2, whose layers of multi-token"),
        ("deepseek_v32", {"num_nextn_predict_layers": 1}, 1, "got 1, expected null for DeepSeek-V3.2"),
        ("nemotron_h", {"num_nextn_predict_layers": 1}, 1, "got 1, expected null for Nemotron-3 Nano, whose layers of"),
        ("qwen3_moe", {}, 1, "got 1, expected null for Qwen3-MoE, which has no layers of multi-token prediction;"),
        ("dots1", {}, 1, "got 1, expected null for dots.llm1, which has no layers of multi-token prediction; they"),
    ],
)
def test_models_whose_layers_cannot_be_trained(
    name: str, fields: dict[str, Any], wanted: int | None, problem: str | None
) -> None:
    hf_config = FAMILY_MODELS[name].hf_config()
    for field, value in fields.items():
        setattr(hf_config, field, value)
    policy = tiny_policy(mtp_num_layers=wanted)
    if problem is None:
        assert num_trained_mtp_layers(policy, hf_config) == (wanted or 0)
        return
    with pytest.raises(ConfigurationError) as caught:
        num_trained_mtp_layers(policy, hf_config)
    (line,) = caught.value.problems
    assert line.startswith(f"{M}.mtp_num_layers: {problem}")
