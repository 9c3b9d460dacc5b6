# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The model's fields, the machine's and the user's, in Megatron-Core's TransformerConfig."""

import json
import re
from typing import Any

import pytest
import torch

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.megatron.model.releases import MEGATRON_VERSION, transformer_config_fields
from nemo_rl_moe.models.megatron.model.stages import layers_of_chunks, layers_of_stages
from nemo_rl_moe.models.megatron.model.transformer_config import (
    build_transformer_config,
    effective_moe_configuration,
)
from nemo_rl_moe.models.megatron.model.transformer_problems import _problems_with_stages, _uneven_stages
from tests.support.tiny_model import layout, tiny_hf_config, tiny_policy

# isort: split
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset


def problems_of(hf_config: Any = None, world_size: int = 1, **changes: Any) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        config_of(hf_config, world_size, **changes)
    return caught.value.problems


def config_of(hf_config: Any = None, world_size: int = 1, **changes: Any) -> Any:
    return build_transformer_config(tiny_policy(world_size, **changes), hf_config or tiny_hf_config())


def test_model_fields() -> None:
    changes = {"mlp_only_layers": [1], "rms_norm_eps": 1e-5, "num_experts_per_tok": 3}
    config = config_of(tiny_hf_config(**changes, rope_parameters={"rope_theta": 7.0}))
    expected = {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 8,
        "ffn_hidden_size": 48,
        "moe_ffn_hidden_size": 16,
        "num_moe_experts": 8,
        "moe_router_topk": 3,
        "moe_layer_freq": [1, 0, 1, 1],
        "layernorm_epsilon": 1e-5,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "moe_router_pre_softmax": False,
    }
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.activation_func is torch.nn.functional.silu


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({}, [1, 1, 1, 1]),
        ({"mlp_only_layers": [0, 3]}, [0, 1, 1, 0]),
        ({"decoder_sparse_step": 2}, [0, 1, 0, 1]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [0, 0, 0, 1]),
    ],
)
def test_layers_with_experts(changes: dict[str, Any], pattern: list[int]) -> None:
    assert config_of(tiny_hf_config(**changes)).moe_layer_freq == pattern


def test_raw_router_weights_come_from_a_softmax_over_all_experts() -> None:
    assert config_of(tiny_hf_config(norm_topk_prob=False)).moe_router_pre_softmax is True


def test_user_fields_win() -> None:
    fields = {"moe_router_topk": 4, "moe_aux_loss_coeff": 0.3, "moe_router_dtype": "fp32"}
    fields["moe_router_pre_softmax"] = True
    config = config_of(**fields)
    assert {name: getattr(config, name) for name in fields} == fields


def test_z_loss_of_zero_is_off() -> None:
    assert config_of(moe_z_loss_coeff=0.0).moe_z_loss_coeff is None
    assert config_of(moe_z_loss_coeff=0.5).moe_z_loss_coeff == 0.5


def test_layers_that_cannot_be_cut_are_all_named_at_once() -> None:
    hf_config = tiny_hf_config(
        num_hidden_layers=3, num_experts=9, num_attention_heads=3, num_key_value_heads=1, mlp_only_layers=[]
    )
    key = "policy.megatron_cfg."
    assert problems_of(hf_config, 8, **layout(tp=2, pp=2, ep=2)) == [
        f"{key}pipeline_model_parallel_size: got 2 (x 1 virtual stages), which does not divide the model's 3 layers;"
        " expected, for one, num_layers_in_first_pipeline_stage=2 num_layers_in_last_pipeline_stage=1",
        f"{key}tensor_model_parallel_size: got 2, which does not divide the model's 3 query heads",
        f"{key}tensor_model_parallel_size: got 2, which does not divide the model's 1 key and value heads",
        f"{key}expert_model_parallel_size: got 2, which does not divide the model's 9 experts",
    ]


@pytest.mark.parametrize(
    ("num_layers", "sizes", "expected"),
    [
        (61, {"pp": 4, "first": 15, "last": 14}, [15, 16, 16, 14]),
        (27, {"pp": 2, "last": 13}, [14, 13]),
        (94, {"pp": 4, "first": 23, "last": 23}, [23, 24, 24, 23]),
        (94, {"pp": 4, "vpp": 2, "first": 22, "last": 24}, [22, 24, 24, 24]),
        (61, {"pp": 1}, [61]),
    ],
)
def test_layers_of_stages_are_those_that_megatron_builds(
    num_layers: int, sizes: dict[str, int], expected: list[int]
) -> None:
    config = config_of(tiny_hf_config(num_hidden_layers=num_layers), sizes["pp"], **layout(**sizes))
    assert layers_of_stages(config) == expected
    pieces = sizes.get("vpp", 1)
    for stage in range(sizes["pp"]):
        for piece, layers in enumerate(layers_of_chunks(config, stage)):
            number = get_num_layers_to_build(config, vp_stage=piece, pp_rank=stage)
            offset = get_transformer_layer_offset(config, vp_stage=piece, pp_rank=stage)
            assert layers == range(offset, offset + number)
    every = [layer for stage in range(sizes["pp"]) for chunk in layers_of_chunks(config, stage) for layer in chunk]
    assert sorted(every) == list(range(num_layers))
    assert len(layers_of_chunks(config, 0)) == pieces


@pytest.mark.parametrize(
    ("num_layers", "sizes", "expected"),
    [
        (
            61,
            {"pp": 4},
            "pipeline_model_parallel_size: got 4 (x 1 virtual stages), which does not divide the model's 61 layers;"
            " expected, for one, num_layers_in_first_pipeline_stage=15 num_layers_in_last_pipeline_stage=14",
        ),
        (
            61,
            {"pp": 4, "first": 15},
            "num_layers_in_first_pipeline_stage 15: the model has 61 layers, and the rest cannot be divided evenly"
            " among 3 other stages (x 1 virtual stages); expected, for one, num_layers_in_first_pipeline_stage=15"
            " num_layers_in_last_pipeline_stage=14",
        ),
        (
            4,
            {"pp": 2, "first": 3, "last": 2},
            "num_layers_in_first_pipeline_stage 3 and num_layers_in_last_pipeline_stage 2: the model has 4 layers, and"
            " there are no other stages; expected, for one, num_layers_in_first_pipeline_stage=2"
            " num_layers_in_last_pipeline_stage=2",
        ),
        (
            4,
            {"pp": 1, "last": 3},
            "num_layers_in_last_pipeline_stage: got 3, which needs policy.megatron_cfg.pipeline_model_parallel_size"
            " above 1",
        ),
        (
            6,
            {"pp": 2, "vpp": 2, "first": 3, "last": 3},
            "num_layers_in_first_pipeline_stage: got 3, which is no multiple of"
            " policy.megatron_cfg.virtual_pipeline_model_parallel_size 2",
        ),
    ],
)
def test_stages_that_cannot_be_dealt_out_name_ones_that_can(
    num_layers: int, sizes: dict[str, int], expected: str
) -> None:
    problems = problems_of(tiny_hf_config(num_hidden_layers=num_layers), sizes["pp"], **layout(**sizes))
    assert problems[0] == f"policy.megatron_cfg.{expected}"


@pytest.mark.parametrize("num_layers", range(2, 100))
def test_the_stages_that_are_named_can_be_dealt_out(num_layers: int) -> None:
    for stages in range(2, min(num_layers, 17)):
        for pieces in (1, 2):
            advice = _uneven_stages(num_layers, stages, pieces)
            if not advice:
                continue
            first, last = (int(number) for number in re.findall(r"=(\d+)", advice))
            fields = layout(pp=stages, vpp=pieces, first=first, last=last)
            assert _problems_with_stages({"num_layers": num_layers, **fields}) == []
            assert last <= first <= max(first, -(-num_layers // stages))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"moe_grouped_gemm": True}, "moe_grouped_gemm: got true, which needs Transformer Engine; leave it out"),
        (
            {"moe_router_load_balancing_type": "sinkhorn"},
            "moe_aux_loss_coeff: got 0.05, expected 0 with policy.megatron_cfg.moe_router_load_balancing_type sinkhorn,"
            " which has no loss",
        ),
        (
            {
                "moe_expert_capacity_factor": 4.5,
                "moe_pad_expert_input_to_capacity": True,
                "moe_token_dispatcher_type": "alltoall",
            },
            "moe_expert_capacity_factor: got 4.5, expected at most 4 with"
            " policy.megatron_cfg.moe_pad_expert_input_to_capacity true: an expert cannot be padded to more tokens than"
            " there are",
        ),
        (
            {"moe_latent_size": 16},
            "moe_latent_size: got 16, expected null on CPUs: its projections are layers of Transformer Engine",
        ),
    ],
    ids=["grouped kernels", "sinkhorn has no loss", "more padding than tokens", "latent experts"],
)
def test_a_field_that_cannot_be_had_is_named(changes: dict[str, Any], problem: str) -> None:
    assert problems_of(**changes) == [f"policy.megatron_cfg.{problem}"]


def test_one_expert_a_token_needs_a_weight_that_can_be_learnt() -> None:
    (problem,) = problems_of(moe_router_topk=1)
    assert problem.startswith("policy.megatron_cfg.moe_router_topk: got 1, ")
    assert problem.endswith("expected 2 or more, or policy.megatron_cfg.moe_router_pre_softmax=true")
    assert config_of(moe_router_topk=1, moe_router_pre_softmax=True).moe_router_topk == 1


@pytest.mark.parametrize("name", ["batch_p2p_comm", "overlap_p2p_comm"])
def test_overrides_that_undo_a_correction_are_refused(name: str) -> None:
    assert problems_of(model_overrides=f"{{{name}: true}}") == [
        f"policy.megatron_cfg.model_overrides.{name}: got true, expected false: with interleaved stages, gloo then"
        " mixes up the tensors between stages, without an error"
    ]


def test_frozen_routers_keep_their_bias() -> None:
    bias = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    assert config_of(freeze_moe_router=True, moe_router_bias_update_rate=0.01, **bias).moe_router_bias_update_rate == 0


def test_what_megatron_core_refuses_is_one_line_of_the_user() -> None:
    (problem,) = problems_of(
        moe_expert_capacity_factor=1.0, moe_router_load_balancing_type="sinkhorn", moe_aux_loss_coeff=0.0
    )
    assert problem.startswith("policy.megatron_cfg: Megatron-Core refuses this configuration: ")


def test_fields_of_other_versions_are_named() -> None:
    newer = {"moe_router_force_biased", "moe_ncclep_static_shape"}
    missing = newer - transformer_config_fields()
    assert missing == (newer if MEGATRON_VERSION == "0.16.1" else set())


@pytest.mark.parametrize(
    ("value", "granularity", "modules"), [("none", None, None), ("full", "full", None), ("moe", "selective", ["moe"])]
)
def test_activation_checkpointing(value: str, granularity: str | None, modules: list[str] | None) -> None:
    config = config_of(activation_checkpointing=value)
    assert config.recompute_granularity == granularity
    if modules is not None:
        assert config.recompute_modules == modules


def test_communication_that_goes_wrong_under_gloo_is_off() -> None:
    config = config_of(None, 2, **layout(pp=2, vpp=2))
    assert config.batch_p2p_comm is False
    assert config.overlap_p2p_comm is False


def test_effective_configuration_says_what_is_in_force() -> None:
    effective = effective_moe_configuration(config_of(tiny_hf_config(mlp_only_layers=[2]), moe_aux_loss_coeff=0.25))
    assert effective["moe_aux_loss_coeff"] == 0.25
    assert effective["moe_layer_freq"] == [1, 1, 0, 1]
    assert effective["num_moe_experts"] == 8
    assert effective["moe_z_loss_coeff"] is None
    assert set(effective) == {
        name for name in transformer_config_fields() if name.startswith("moe_") or name == "num_moe_experts"
    }
    assert json.loads(json.dumps(effective)) == effective


def test_auxiliary_loss_of_the_model_is_off_where_it_has_none() -> None:
    policy = tiny_policy(1)
    chosen = policy.megatron_cfg.model_fields_set - {"moe_aux_loss_coeff", "moe_router_load_balancing_type"}
    values = {name: getattr(policy.megatron_cfg, name) for name in chosen}
    megatron = type(policy.megatron_cfg).model_construct(_fields_set=set(chosen), **values)
    config = build_transformer_config(
        policy.model_copy(update={"megatron_cfg": megatron}), tiny_hf_config(router_aux_loss_coef=0.0)
    )
    assert (config.moe_router_load_balancing_type, config.moe_aux_loss_coeff) == ("none", 0.0)
