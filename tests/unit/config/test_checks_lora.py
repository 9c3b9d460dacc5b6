# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules of `policy.lora`, each broken once; and targets that a model has no layer for."""

from typing import Any

import pytest

from nemo_rl_moe.config.loading import load_config
from nemo_rl_moe.models.families.linear_targets import target_problems
from tests.support.family_models import FAMILY_MODELS
from tests.unit.config.conftest import Problems

M = "policy.megatron_cfg"
OVERLAPPING = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")


def lora(**changes: Any) -> str:
    fields = {"rank": 4, "alpha": 8.0, "targets": "[all-linear]", "dropout": 0.0, "experts": "per_expert"}
    values = {**fields, "use_rslora": "false", "init": "kaiming", "path": "null", **changes}
    return f"policy.lora={{{', '.join(f'{name}: {value}' for name, value in values.items())}}}"


@pytest.mark.parametrize(
    ("overrides", "line"),
    {
        (lora(targets="[q_proj]"),): "policy.lora.experts: got per_expert, but policy.lora.targets has no layer of the"
        " experts; expected policy.lora.experts none, or a target gate_proj, up_proj, down_proj or all-linear",
        (lora(), "policy.freeze.language_model=true"): "policy.freeze.language_model: got true, expected false with"
        " policy.lora, which freezes all weights",
        (lora(targets="[all-linear, router]"), f"{M}.freeze_moe_router=true"): f"{M}.freeze_moe_router: got true,"
        " expected false with router among policy.lora.targets",
        (lora(), f"+{M}.moe_router_bias_update_rate=0.001"): f"{M}.moe_router_bias_update_rate: got 0.001, expected 0.0"
        " or nothing with policy.lora, which leaves the expert bias as it is",
        (lora(), f"+{M}.moe_shared_expert_overlap=true"): f"{M}.moe_shared_expert_overlap: got true, expected false"
        " with policy.lora",
        (
            lora(),
            *(f"{M}.distributed_data_parallel_config.{name}=true" for name in OVERLAPPING),
        ): f"{M}.distributed_data_parallel_config.overlap_param_gather: got true, expected false with policy.lora",
    }.items(),
)
def test_a_broken_rule_is_one_line(problems_of: Problems, overrides: tuple[str, ...], line: str) -> None:
    assert problems_of(*overrides) == [line]


def test_rollouts_know_the_adapters(grpo_problems_of: Problems) -> None:
    assert grpo_problems_of("policy.generation.lora_refit=adapter") == [
        "policy.generation.lora_refit: got adapter, expected merged because policy.lora is null"
    ]
    assert grpo_problems_of(lora(), "policy.generation.lora_refit=adapter") == [
        "policy.generation.lora_refit: got adapter, expected merged with policy.generation.backend megatron; engines"
        " that take an adapter: megatron_separate"
    ]
    over_device = ("policy.generation.backend=megatron_separate", "policy.generation.weight_transport=nccl")
    line = (
        "policy.generation.weight_transport: got nccl, expected files or gloo with policy.generation.lora_refit adapter"
    )
    assert line in grpo_problems_of(lora(), "policy.generation.lora_refit=adapter", *over_device)
    assert line not in grpo_problems_of(lora(), *over_device)
    assert grpo_problems_of(lora(dropout=0.1)) == [
        "policy.lora.dropout: got 0.1, expected 0.0: rollouts are sampled without dropout, so dropout in training would"
        " change the probability ratio"
    ]


@pytest.mark.parametrize(("targets", "meant"), [("[k_proj, q_porj]", "q_proj"), ("q_proj", "[q_proj]")])
def test_an_unknown_target_is_named(problems_of: Problems, targets: str, meant: str) -> None:
    (problem,) = problems_of(lora(targets=targets))
    assert problem.startswith("policy.lora.targets: got ")
    assert problem.endswith(f", router; did you mean {meant}?")


@pytest.mark.parametrize("name", ["r", "use_dora"])
def test_names_of_peft_get_the_keys_that_there_are(problems_of: Problems, name: str) -> None:
    assert problems_of(lora(), f"+policy.lora.{name}=8") == [
        f"policy.lora.{name}: unknown key; allowed here: rank, alpha, use_rslora, targets, dropout, experts, init, path"
    ]


@pytest.mark.parametrize(
    ("model", "changes", "said"),
    [
        ("llama", {"experts": "none"}, None),
        ("llama", {}, "policy.lora.experts: got 'per_expert', expected 'none': Llama has no experts"),
        (
            "qwen3_moe",
            {"targets": "[kv_b_proj, down_proj]"},
            "policy.lora.targets: got 'kv_b_proj', but Qwen3-MoE has no",
        ),
        (
            "deepseek_v2",
            {"targets": "[q_a_proj, down_proj]"},
            "policy.lora.targets: got 'q_a_proj', but DeepSeek-V2 has",
        ),
        ("deepseek_v3", {"targets": "[q_a_proj, kv_b_proj, down_proj, router]"}, None),
        ("gpt_oss", {"targets": "[up_proj]"}, "policy.lora.targets: got one of gate_proj and up_proj, expected both"),
        ("gpt_oss", {}, None),
        ("mixtral", {"targets": "[router, down_proj]"}, None),
        ("qwen3_next", {"targets": "[in_proj_qkvz, in_proj_ba, out_proj, down_proj]"}, None),
        ("qwen3_5_text", {"targets": "[in_proj_qkv, in_proj_z, in_proj_b, in_proj_a]", "experts": "none"}, None),
        (
            "qwen3_next",
            {"targets": "[in_proj_qkv, down_proj]"},
            "policy.lora.targets: got 'in_proj_qkv', but Qwen3-Next has no such layer; it has: down_proj, gate_proj,"
            " in_proj_ba, in_proj_qkvz, ",
        ),
    ],
)
def test_targets_are_layers_of_the_model(model: str, changes: dict[str, Any], said: str | None) -> None:
    section = load_config("sft_tiny_moe.yaml", [lora(**changes)], check_paths=False).policy.lora
    assert section is not None
    problems = target_problems(section, FAMILY_MODELS[model].hf_config())
    assert problems == [] if said is None else problems[0].startswith(said)


def test_all_linear_leaves_the_router_alone() -> None:
    from nemo_rl_moe.models.families.linear_targets import PLACES, chosen_sources
    from nemo_rl_moe.models.families.rules import rule

    rules = {place: rule(*(f"{name}.weight" for name in names or ("in_proj_z",))) for place, names in PLACES.items()}
    chosen = {place: chosen_sources(place, found, ["all-linear"]) for place, found in rules.items()}
    assert chosen.pop("mlp.router") == [None]
    assert all(all(names) for names in chosen.values())
    assert chosen_sources("mlp.router", rules["mlp.router"], ["all-linear", "router"]) == ["router"]
