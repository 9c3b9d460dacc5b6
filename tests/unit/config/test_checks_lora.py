# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules of the adapters of a policy and of a critic, each broken once; and targets that a model has no layer for."""

from typing import Any

import pytest

from nemo_rl_moe.config.loading import load_any_config, load_config
from nemo_rl_moe.config.schema_lora import LoraConfig
from nemo_rl_moe.generation.vllm.adapter_rules import target_problem
from nemo_rl_moe.models.families.linear_targets import target_problems
from tests.support.family_models import FAMILY_MODELS
from tests.unit.config.conftest import Problems, refused

M = "policy.megatron_cfg"
OVERLAPPING = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")


def lora(section: str = "policy", **changes: Any) -> str:
    fields = {"rank": 4, "alpha": 8.0, "targets": "[all-linear]", "dropout": 0.0, "experts": "per_expert"}
    values = {**fields, "use_rslora": "false", "init": "kaiming", "path": "null", **changes}
    return f"{section}.lora={{{', '.join(f'{name}: {value}' for name, value in values.items())}}}"


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


@pytest.mark.parametrize(
    ("adapters", "more", "line"),
    [
        (
            {"targets": "[q_proj]"},
            (),
            "value.lora.experts: got per_expert, but value.lora.targets has no layer of the experts; expected"
            " value.lora.experts none, or a target gate_proj, up_proj, down_proj or all-linear",
        ),
        (
            {"targets": "[all-linear, router]"},
            (f"{M}.freeze_moe_router=true",),
            f"role critic: {M}.freeze_moe_router: got true, expected false with router among value.lora.targets",
        ),
        (
            {},
            tuple(f"{M}.distributed_data_parallel_config.{name}=true" for name in OVERLAPPING),
            f"role critic: {M}.distributed_data_parallel_config.overlap_param_gather: got true, expected false with"
            " value.lora",
        ),
        ({"rank": 0}, (), "value.lora.rank: got 0 (int), expected a whole number above 0 and up to 4096"),
    ],
)
def test_a_critic_has_the_rules_of_the_policy(adapters: dict[str, Any], more: tuple[str, ...], line: str) -> None:
    overrides = [lora("value", **adapters), *more]
    assert refused(load_any_config, "ppo_tiny_moe.yaml", overrides, check_paths=False) == [line]


@pytest.mark.parametrize("section", ["policy", "value"])
def test_the_folder_of_an_adapter_exists(section: str) -> None:
    problems = refused(load_any_config, "ppo_tiny_moe.yaml", [lora(section, path="no/folder")], check_paths=True)
    (line,) = [problem for problem in problems if ".lora." in problem]
    assert line.startswith(f"{section}.lora.path: ")
    assert line.endswith("; expected a folder in peft's form, `final` or a checkpoint")


def test_a_critic_may_have_dropout() -> None:
    """No rollout is sampled from it."""
    load_any_config("ppo_tiny_moe.yaml", [lora("value", dropout=0.1)], check_paths=False)


def test_rollouts_know_the_adapters(grpo_problems_of: Problems) -> None:
    assert grpo_problems_of("policy.generation.lora_refit=adapter") == [
        "policy.generation.lora_refit: got adapter, expected merged because policy.lora is null"
    ]
    assert grpo_problems_of(lora(), "policy.generation.lora_refit=adapter") == [
        "policy.generation.lora_refit: got adapter, expected merged with policy.generation.backend megatron; engines"
        " that take an adapter: megatron_separate, vllm"
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


OF_VLLM = ("policy.generation.backend=vllm", "policy.generation.lora_refit=adapter")
HOW = "with policy.generation.backend vllm and policy.generation.lora_refit adapter"


@pytest.mark.parametrize(
    ("changes", "more", "line"),
    [
        ({}, (), None),
        (
            {"experts": "shared"},
            (),
            f"policy.lora.experts: got shared, expected none {HOW}: vLLM applies no adapters to experts on CPUs, and on"
            " GPUs this has not been tried; policy.generation.backend megatron_separate applies them",
        ),
        ({"rank": 513}, (), f"policy.lora.rank: got 513, expected at most 512 {HOW}"),
        ({"rank": 512}, (), None),
        (
            {},
            ("policy.generation.vllm.prefix_caching=keep", "grpo.rollouts.mode=asynchronous"),
            f"policy.generation.vllm.prefix_caching: got 'keep', expected 'reset' {HOW}: vLLM keeps the prefixes of"
            " each adapter apart, so none would be used after an update",
        ),
    ],
)
def test_adapters_that_vllm_cannot_apply_are_refused(
    grpo_problems_of: Problems, changes: dict[str, Any], more: tuple[str, ...], line: str | None
) -> None:
    adapters = lora(**{"experts": "none", "dropout": 0.1, **changes})  # dropout is refused always
    problems = grpo_problems_of(adapters, *OF_VLLM, *more)
    assert [each for each in problems if HOW in each] == ([] if line is None else [line])
    assert not [each for each in grpo_problems_of(adapters, OF_VLLM[0], *more) if HOW in each]


def section(**changes: Any) -> LoraConfig:
    found = load_config("sft_tiny_moe.yaml", [lora(**changes)], check_paths=False).policy.lora
    assert found is not None
    return found


def test_targets_that_vllm_cannot_apply_are_refused_by_model() -> None:
    hybrid, latent = (FAMILY_MODELS[name].hf_config() for name in ("qwen3_5_moe_text", "deepseek_v3"))
    assert target_problem(section(), hybrid, "a/model") is None
    assert target_problem(section(targets="[o_proj, router]", experts="none"), latent, "a/model") is None
    assert target_problem(section(), latent, "a/model") == (
        "policy.lora.targets: got [all-linear], expected some of down_proj, gate_proj, o_proj, up_proj"
        f" {HOW}: vLLM applies no adapters to kv_a_proj_with_mqa, kv_b_proj, q_a_proj, q_b_proj of a/model"
    )
    assert target_problem(section(targets="[q_a_proj]", experts="none"), latent, "a/model") == (
        "policy.lora.targets: got [q_a_proj], expected some of down_proj, gate_proj, o_proj, up_proj"
        f" {HOW}: vLLM applies no adapters to q_a_proj of a/model"
    )


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
        ("nemotron_h", {}, "policy.lora: got a section, expected null: adapters of Nemotron-3 Nano are not supported"),
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
    problems = target_problems(section(**changes), FAMILY_MODELS[model].hf_config())
    assert problems == [] if said is None else problems[0].startswith(said)


def test_all_linear_leaves_the_router_alone() -> None:
    from nemo_rl_moe.models.families.linear_targets import PLACES, chosen_sources
    from nemo_rl_moe.models.families.rules import rule

    rules = {place: rule(*(f"{name}.weight" for name in names or ("in_proj_z",))) for place, names in PLACES.items()}
    chosen = {place: chosen_sources(place, found, ["all-linear"]) for place, found in rules.items()}
    assert chosen.pop("mlp.router") == [None]
    assert all(all(names) for names in chosen.values())
    assert chosen_sources("mlp.router", rules["mlp.router"], ["all-linear", "router"]) == ["router"]
