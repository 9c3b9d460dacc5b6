# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Who has set a router setting, what is warned of, and what an exported config.json says."""

from typing import Any

import pytest

from nemo_rl_moe.models.families import FAMILIES, family_of
from nemo_rl_moe.models.megatron.model.router_settings import exported_config, setting_sources, setting_warnings
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config, effective_moe_configuration
from tests.support.family_models import FAMILY_MODELS
from tests.support.tiny_model import tiny_hf_config, tiny_policy


def policy_with(**changes: Any) -> Any:
    """A policy with these settings; of the `moe_*` fields that the exemplar sets, none besides."""
    policy = tiny_policy(1, **changes)
    fields = policy.megatron_cfg
    for name in ("moe_aux_loss_coeff", "moe_router_load_balancing_type"):
        if name not in changes:
            fields.model_fields_set.discard(name)
    return policy


@pytest.fixture
def deepseek() -> Any:
    from transformers import DeepseekV3Config

    return DeepseekV3Config(n_group=1, topk_group=1, num_key_value_heads=128)


def settings_of(policy: Any, **model: Any) -> tuple[Any, Any]:
    hf_config = tiny_hf_config(**model)
    return hf_config, build_transformer_config(policy, hf_config)


def test_each_setting_says_who_has_set_it() -> None:
    policy = policy_with(moe_router_topk=4, moe_z_loss_coeff=0.001)
    config_json = {"num_experts_per_tok": 2, "norm_topk_prob": True}
    hf_config, config = settings_of(policy)
    sources = setting_sources(policy, hf_config, config_json, config)
    assert sources["moe_router_topk"] == "policy.megatron_cfg; the model's own is 2"
    assert sources["moe_z_loss_coeff"] == "policy.megatron_cfg"
    assert sources["moe_router_pre_softmax"] == "config.json: norm_topk_prob"
    assert sources["moe_router_score_function"] == "as Qwen3-MoE has it"
    assert sources["num_moe_experts"] == "the model"
    silent = "transformers' default of router_aux_loss_coef, which config.json does not set"
    assert sources["moe_aux_loss_coeff"] == silent
    # Megatron-Core's own defaults are in force too, and nobody has set them.
    unset = effective_moe_configuration(config).keys() - sources.keys()
    assert {"moe_token_drop_policy", "moe_expert_capacity_factor"} <= unset


def test_a_field_under_another_name_counts_as_said() -> None:
    policy = policy_with()
    hf_config, config = settings_of(policy)
    hf_config.attribute_map = {"router_aux_loss_coef": "balance"}
    sources = setting_sources(policy, hf_config, {"balance": 0.1}, config)
    assert sources["moe_aux_loss_coeff"] == "config.json: router_aux_loss_coef"


@pytest.mark.parametrize(
    ("config_json", "source"),
    [
        ({}, "transformers' default of router_aux_loss_coef, which config.json does not set"),
        ({"router_aux_loss_coef": 0.001}, "config.json: router_aux_loss_coef"),
    ],
)
def test_auxiliary_loss_that_the_user_has_not_asked_for_is_warned_of(config_json: dict[str, Any], source: str) -> None:
    policy = policy_with()
    hf_config, config = settings_of(policy, router_aux_loss_coef=0.001)
    assert setting_warnings(policy, hf_config, config_json, config) == [
        f"moe_aux_loss_coeff: 0.001 trains the routers, though the run's configuration does not say so ({source}); "
        "policy.megatron_cfg.moe_aux_loss_coeff sets it (0: no loss)"
    ]
    hf_config, config = settings_of(policy, router_aux_loss_coef=0.0)
    assert setting_warnings(policy, hf_config, config_json, config) == []


@pytest.mark.parametrize(
    "chosen", [{"moe_aux_loss_coeff": 0.0}, {"moe_aux_loss_coeff": 0.001}, {"moe_router_load_balancing_type": "none"}]
)
def test_auxiliary_loss_that_the_user_has_chosen_is_not_warned_of(chosen: dict[str, Any]) -> None:
    policy = policy_with(**chosen)
    hf_config, config = settings_of(policy, router_aux_loss_coef=0.001)
    assert {name: getattr(config, name) for name in chosen} == chosen
    assert setting_warnings(policy, hf_config, {}, config) == []


def test_pretrained_router_used_in_another_way_is_warned_of() -> None:
    changes = {"moe_router_topk": 4, "moe_router_pre_softmax": True, "moe_aux_loss_coeff": 0.5}
    policy = policy_with(init="pretrained", **changes)
    hf_config, config = settings_of(policy)
    lines = setting_warnings(policy, hf_config, {"router_aux_loss_coef": 0.01}, config)
    assert [line.split(":")[0] for line in lines] == [
        "policy.megatron_cfg.moe_router_pre_softmax",
        "policy.megatron_cfg.moe_router_topk",
    ]
    assert "4 takes the place of the model's own 2" in lines[1]
    from_scratch = policy_with(init="random", **changes)
    assert setting_warnings(from_scratch, hf_config, {"router_aux_loss_coef": 0.01}, config) == []


def test_exported_config_says_what_is_in_force() -> None:
    policy = policy_with(moe_router_topk=4, moe_router_pre_softmax=True, moe_aux_loss_coeff=0.5, precision="bfloat16")
    config_json = tiny_hf_config().to_dict()
    hf_config, config = settings_of(policy)
    exported = exported_config(policy, hf_config, config_json, config)
    assert exported.not_expressed == ()
    expected = {"num_experts_per_tok": 4, "norm_topk_prob": False, "router_aux_loss_coef": 0.5, "dtype": "bfloat16"}
    assert exported.content == config_json | expected


def test_exported_config_is_the_models_own_where_nothing_was_changed() -> None:
    policy = policy_with()
    config_json = {**tiny_hf_config().to_dict(), "torch_dtype": "bfloat16", "auto_map": {"AutoConfig": "x.Y"}}
    hf_config, config = settings_of(policy)
    exported = exported_config(policy, hf_config, config_json, config)
    expected = config_json | {"torch_dtype": "float32"}
    del expected["auto_map"]
    assert exported.content == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        {"moe_shared_expert_intermediate_size": 16},
        {"moe_router_topk_scaling_factor": 2.5},
        {"moe_router_num_groups": 2, "moe_router_group_topk": 1},
        {"moe_layer_freq": 2},
        {"moe_ffn_hidden_size": 24},
        {"moe_expert_capacity_factor": 1.25},
    ],
)
def test_what_transformers_cannot_have_is_named(changes: dict[str, Any]) -> None:
    policy = policy_with(**changes)
    config_json = tiny_hf_config().to_dict()
    hf_config, config = settings_of(policy)
    exported = exported_config(policy, hf_config, config_json, config)
    assert set(exported.not_expressed) == changes.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_router_field_is_one_that_the_family_sets(name: str) -> None:
    hf_config = FAMILY_MODELS[name].hf_config()
    family = family_of(hf_config)
    assert family.router_fields.keys() <= family.transformer_fields(hf_config).keys()
    read = family.config_fields.read
    assert {field for field in family.router_fields.values() if field is not None} <= read


def test_a_value_that_transformers_refuses_is_named(deepseek: Any) -> None:
    config_json = deepseek.to_dict()
    policy = policy_with(moe_router_topk=1, moe_router_bias_update_rate=0.5)
    config = build_transformer_config(policy, deepseek)
    exported = exported_config(policy, deepseek, config_json, config)
    # The rate is for training alone; one expert a token has another weight here than in transformers.
    assert exported.not_expressed == ("moe_router_topk",)
    assert exported.content["num_experts_per_tok"] == deepseek.num_experts_per_tok


def test_a_coefficient_alone_turns_the_loss_on() -> None:
    policy = policy_with(moe_aux_loss_coeff=0.25)
    hf_config, config = settings_of(policy, router_aux_loss_coef=0.0)
    assert (config.moe_router_load_balancing_type, config.moe_aux_loss_coeff) == ("aux_loss", 0.25)
    sources = setting_sources(policy, hf_config, {}, config)
    assert sources["moe_router_load_balancing_type"] == "follows from policy.megatron_cfg.moe_aux_loss_coeff"
    none = policy_with(moe_aux_loss_coeff=0.25, moe_router_load_balancing_type="none")
    _, config = settings_of(none, router_aux_loss_coef=0.0)
    assert config.moe_router_load_balancing_type == "none"


def test_layers_that_are_left_out_are_not_promised(deepseek: Any) -> None:
    policy = policy_with()
    config = build_transformer_config(policy, deepseek)
    config_json = {**deepseek.to_dict(), "num_nextn_predict_layers": 1}
    assert exported_config(policy, deepseek, config_json, config).content["num_nextn_predict_layers"] == 0
    del config_json["num_nextn_predict_layers"]
    assert "num_nextn_predict_layers" not in exported_config(policy, deepseek, config_json, config).content
    sources = setting_sources(policy, deepseek, config_json, config)
    assert sources["moe_aux_loss_coeff"] == "config.json does not set aux_loss_alpha"


def test_kind_of_the_loss_is_written_as_the_switch_that_it_is() -> None:
    from transformers import DeepseekV2Config

    hf_config = DeepseekV2Config(num_experts_per_tok=2, aux_loss_alpha=0.001, seq_aux=True)
    config_json = hf_config.to_dict()
    for kind, switch in (("aux_loss", False), ("seq_aux_loss", True)):
        policy = policy_with(moe_router_load_balancing_type=kind, moe_aux_loss_coeff=0.5)
        exported = exported_config(policy, hf_config, config_json, build_transformer_config(policy, hf_config))
        assert exported.content["seq_aux"] is switch
        assert exported.content["aux_loss_alpha"] == 0.5


def test_a_shared_gate_that_the_family_has_not_is_named(deepseek: Any) -> None:
    policy = policy_with(moe_shared_expert_gate=True)
    config = build_transformer_config(policy, deepseek)
    assert exported_config(policy, deepseek, deepseek.to_dict(), config).not_expressed == ("moe_shared_expert_gate",)
