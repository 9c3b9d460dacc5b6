# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What the families make of `config.json`: of released models, of stretched positions, of what is not supported."""

import json
import math
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.families import FAMILIES, family_of
from nemo_rl_moe.models.families import decoder as rotary
from nemo_rl_moe.models.families.refused import REFUSED
from nemo_rl_moe.models.hf_files import load_hf_config, plain_config
from nemo_rl_moe.models.megatron.model.memory_estimate import active_parameters, whole_model_parameters
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config
from tests.support.family_models import FAMILY_MODELS
from tests.support.published_configs import DEEPSEEK_CONFIGS, FP8, PUBLISHED_CONFIGS, PublishedConfig
from tests.support.tiny_model import tiny_policy


def read_config(folder: Path, **fields: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(fields))
    return load_hf_config(str(folder))


OF_20B = {"num_hidden_layers": 24, "num_local_experts": 32, "layer_types": ["sliding_attention", "full_attention"] * 12}
PUBLISHED = {
    **PUBLISHED_CONFIGS,
    **DEEPSEEK_CONFIGS,
    # The model's card says 20.9 billion.
    "gpt-oss-20b": PublishedConfig({**PUBLISHED_CONFIGS["gpt-oss-120b"].config_json, **OF_20B}, 20_914_757_184),
}
_ALL = {
    "multi_latent_attention": True,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.001,
}
_V2 = {**_ALL, "moe_router_score_function": "softmax", "moe_router_pre_softmax": True, "moe_router_topk": 6}
_V3 = {
    **_ALL,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.0,
}
# In billions, as the models' cards have them.
ACTIVE = {"DeepSeek-V2-Lite": 2.4, "DeepSeek-V2": 21, "DeepSeek-V3": 37, "Moonlight-16B-A3B": 3}
EXPECTED_FIELDS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {"num_moe_experts": None, "num_query_groups": 8, "kv_channels": 128, "qk_layernorm": False},
    "Mistral-7B-v0.3": {"num_query_groups": 8, "kv_channels": 128, "window_size": None},
    "Mixtral-8x7B-v0.1": {
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 14336,
        "moe_router_pre_softmax": False,
        "add_qkv_bias": False,
    },
    "Mixtral-8x22B-v0.1": {"num_moe_experts": 8, "moe_ffn_hidden_size": 16384, "num_query_groups": 8},
    "OLMoE-1B-7B-0924": {
        "num_moe_experts": 64,
        "moe_router_topk": 8,
        "moe_ffn_hidden_size": 1024,
        "moe_router_pre_softmax": True,
        "qk_layernorm": True,
    },
    "Qwen1.5-MoE-A2.7B": {
        "num_moe_experts": 60,
        "moe_router_topk": 4,
        "moe_router_pre_softmax": True,
        "moe_shared_expert_intermediate_size": 5632,
        "moe_shared_expert_gate": True,
        "add_qkv_bias": True,
        "add_bias_linear": False,
    },
    "Qwen2-57B-A14B": {"num_moe_experts": 64, "moe_router_topk": 8, "moe_shared_expert_intermediate_size": 20480},
    "Qwen2.5-0.5B": {"num_query_groups": 2, "kv_channels": 64, "add_qkv_bias": True, "add_bias_linear": False},
    "Qwen3-30B-A3B-Thinking-2507": {"num_moe_experts": 128, "qk_layernorm": True},
    "Qwen3-30B-A3B": {
        "num_moe_experts": 128,
        "moe_router_topk": 8,
        "moe_router_pre_softmax": False,
        "moe_ffn_hidden_size": 768,
        "kv_channels": 128,
        "qk_layernorm": True,
        "moe_shared_expert_intermediate_size": None,
    },
    "DeepSeek-V2-Lite": {
        **_V2,
        "q_lora_rank": None,
        "moe_layer_freq": [0] + [1] * 26,
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_router_topk_scaling_factor": 1.0,
        "moe_shared_expert_intermediate_size": 2816,
        "rope_type": "yarn",
        "rotary_scaling_factor": 40.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    "DeepSeek-V2": {
        **_V2,
        "q_lora_rank": 1536,
        "moe_router_num_groups": 8,
        "moe_router_group_topk": 3,
        "moe_router_topk_scaling_factor": 16.0,
        "moe_shared_expert_intermediate_size": 3072,
    },
    "DeepSeek-V3": {
        **_V3,
        "moe_layer_freq": [0] * 3 + [1] * 58,
        "moe_router_topk": 8,
        "moe_router_num_groups": 8,
        "moe_router_group_topk": 4,
        "moe_router_topk_scaling_factor": 2.5,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
    "Moonlight-16B-A3B": {
        **_V3,
        "q_lora_rank": None,
        "moe_router_topk": 6,
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_router_topk_scaling_factor": 2.446,
        "layernorm_epsilon": 1e-5,
        "rope_type": "rope",
        "rotary_base": 50000.0,
        "rotary_scaling_factor": 1.0,
    },
    "gpt-oss-20b": {
        "window_size": (127, 0),
        "window_attn_skip_freq": [1, 0] * 12,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "bias_dropout_fusion": False,
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
        # Cosines and sines carry 0.1 log(32) + 1 each (YaRN, arXiv:2309.00071, equation 22).
        "softmax_scale": pytest.approx(1.3465735902799727**2 / 8),
        "num_moe_experts": 32,
        "moe_router_topk": 4,
        "moe_ffn_hidden_size": 2880,
    },
    "gpt-oss-120b": {"num_layers": 36, "num_moe_experts": 128, "moe_router_topk": 4, "moe_ffn_hidden_size": 2880},
    "Qwen3-235B-A22B": {"num_layers": 94, "moe_ffn_hidden_size": 1536, "num_query_groups": 4},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_released_models_are_understood(name: str, tmp_path: Path) -> None:
    published = PUBLISHED[name]
    hf_config = read_config(tmp_path, **published.config_json)
    config = build_transformer_config(tiny_policy(), hf_config)
    # The coefficient and the kind of the loss are those that the policy for tests sets.
    of_loss = family_of(hf_config).transformer_fields(hf_config)
    found = vars(config) | {field: of_loss.get(field) for field in LOSS_FIELDS}
    assert {field: found[field] for field in EXPECTED_FIELDS[name]} == EXPECTED_FIELDS[name]
    assert family_of(hf_config).rotary_base(hf_config) == published.config_json["rope_theta"]
    assert whole_model_parameters(config, hf_config) == published.num_parameters
    if name in ACTIVE:
        assert active_parameters(config, hf_config) / 1e9 == pytest.approx(ACTIVE[name], rel=0.15)


LOSS_FIELDS = ("moe_aux_loss_coeff", "moe_router_load_balancing_type")


def test_coefficient_of_the_auxiliary_loss_comes_from_the_model() -> None:
    hf_config = FAMILY_MODELS["mixtral"].hf_config()
    for coefficient, kind in ((0.001, "aux_loss"), (0.0, "none")):
        fields = family_of(hf_config).transformer_fields(hf_config)
        assert [fields[name] for name in LOSS_FIELDS] == [coefficient, kind]
        hf_config.router_aux_loss_coef = 0.0


def test_other_families_are_refused(tmp_path: Path) -> None:
    expected = r"config.json: model_type 'gemma' is not supported; supported: .*mixtral, nemotron_h, olmoe, qwen2, "
    with pytest.raises(ConfigurationError, match=expected):
        read_config(tmp_path, model_type="gemma")


@pytest.mark.parametrize("model_type", REFUSED)
def test_families_that_cannot_work_are_refused_by_name(model_type: str, tmp_path: Path) -> None:
    refused = REFUSED[model_type]
    with pytest.raises(ConfigurationError) as caught:
        read_config(tmp_path, model_type=model_type)
    (problem,) = caught.value.problems
    assert problem == (
        f"policy.model_name: config.json: model_type {model_type!r} ({refused.name}) is not supported: it needs "
        f"{refused.why}; the nearest family that is supported: {refused.nearest}"
    )


@pytest.mark.parametrize("model", FAMILIES)
def test_unknown_field_is_named(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_config(tmp_path, **FAMILY_MODELS[model].config_json(), residual_multiplier=2.0)
    (problem,) = caught.value.problems
    assert problem.startswith("policy.model_name: config.json: residual_multiplier: got 2.0, a field that is not known")


@pytest.mark.parametrize(
    ("model", "field", "value", "supported"),
    [
        ("llama", "mlp_bias", True, "False"),
        ("llama", "attention_bias", True, "False"),
        ("llama", "hidden_act", "gelu", "'silu'"),
        ("mistral", "sliding_window", 4096, "None"),
        ("mixtral", "sliding_window", 4096, "None"),
        ("mixtral", "router_jitter_noise", 0.01, "0.0"),
        ("olmoe", "clip_qkv", 8.0, "None"),
        ("olmoe", "attention_bias", True, "False"),
        ("qwen2", "use_sliding_window", True, "False"),
        ("qwen2_moe", "use_sliding_window", True, "False"),
        ("qwen2", "use_mrope", True, "False"),
        ("qwen3", "attention_bias", True, "False"),
        ("qwen3_moe", "attention_bias", True, "False"),
        ("qwen3_moe", "attention_dropout", 0.1, "0.0 or None"),
        ("qwen3_moe", "hidden_act", "gelu", "'silu'"),
        ("qwen3_moe", "use_sliding_window", True, "False"),
        ("qwen3_moe", "shared_expert_intermediate_size", 16, "0 or None"),
        ("deepseek_v2", "norm_topk_prob", True, "False or None"),
        ("deepseek_v2", "topk_method", "noaux_tc", "'greedy' or 'group_limited_greedy'"),
        ("deepseek_v2", "scoring_func", "sigmoid", "'softmax'"),
        ("deepseek_v2", "moe_layer_freq", 2, "1"),
        ("deepseek_v2", "mlp_bias", True, "False"),
        ("deepseek_v3", "norm_topk_prob", False, "True"),
        ("deepseek_v3", "scoring_func", "softmax", "'sigmoid'"),
        ("deepseek_v3", "topk_method", "greedy", "'noaux_tc'"),
        ("deepseek_v3", "rope_interleave", False, "True or None"),
        ("deepseek_v3", "attention_bias", True, "False"),
        ("gpt_oss", "swiglu_alpha", 1.5, "1.702"),
        ("gpt_oss", "attention_bias", False, "True"),
        ("qwen3_5_moe_text", "attn_output_gate", False, "True"),
        ("qwen3_5_moe_text", "mamba_ssm_dtype", "bfloat16", "'float32'"),
        ("qwen3_5_moe_text", "mlp_only_layers", [0], "[] or None"),
        ("nemotron_h", "mlp_hidden_act", "silu", "'relu2'"),
        ("nemotron_h", "use_conv_bias", False, "True"),
        ("nemotron_h", "norm_topk_prob", False, "True"),
        ("nemotron_h", "sliding_window", 128, "None"),
    ],
)
def test_unsupported_value_is_named(model: str, field: str, value: Any, supported: str, tmp_path: Path) -> None:
    fields = FAMILY_MODELS[model].config_json()
    with pytest.raises(ConfigurationError) as caught:
        read_config(tmp_path, **{**fields, field: value})
    (problem,) = caught.value.problems
    family = FAMILIES[FAMILY_MODELS[model].model_type].name
    assert problem == f"policy.model_name: config.json: {field}: got {value!r}, supported for {family}: {supported}"


YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 32}
MROPE = {**FAMILY_MODELS["qwen3_next"].fields["rope_parameters"], "mrope_section": [1, 1, 0]}
LINEAR_AND_SLIDING = ["linear_attention", "sliding_attention"] * 2


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("deepseek_v3", {"topk_group": 1, "num_experts_per_tok": 5}, "num_experts_per_tok: got 5, more than the"),
        ("deepseek_v3", {"num_experts_per_tok": 1}, "num_experts_per_tok: got 1, supported for DeepSeek-V3: 2 or more"),
        ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads: got 2, expected num_attention_heads, 4"),
        (
            "deepseek_v2",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type: got 'linear', supported here: 'default' or 'yarn'",
        ),
        (
            "deepseek_v2",
            {"rope_parameters": {**YARN, "truncate": False}},
            "rope_parameters.truncate: got false, supported here: true",
        ),
        ("gpt_oss", {"sinks_everywhere": True}, "sinks_everywhere: got True, a field that is not known for gpt-oss"),
        ("gpt_oss", {"rope_parameters": {**YARN, "rope_type": "dynamic"}}, "rope_type: got 'dynamic'"),
        (
            "gpt_oss",
            {"layer_types": ["full_attention", "chunked_attention"] * 2},
            "layer_types: got 'chunked_attention'",
        ),
        ("gpt_oss", {"sliding_window": None}, "sliding_window: got None, expected 1 or more"),
        ("gpt_oss", {"sliding_window": 0}, "sliding_window: got 0, expected 1 or more"),
        (
            "qwen3_next",
            {"layer_types": LINEAR_AND_SLIDING},
            f"layer_types: got {LINEAR_AND_SLIDING}, expected 4 entries of 'linear_attention' or 'full_attention'",
        ),
        (
            "qwen3_next",
            {"linear_num_value_heads": 3},
            "linear_num_value_heads: got 3, expected a multiple of linear_num_key_heads 2",
        ),
        ("qwen3_next", {"linear_num_value_heads": 0}, "linear_num_value_heads: got 0, expected a multiple of"),
        ("qwen3_next", {"linear_num_key_heads": 0}, "linear_num_key_heads: got 0, expected 1 or more"),
        ("qwen3_next", {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim: got 0, expected 1 or more"),
        ("qwen3_next", {"rope_parameters": MROPE}, "rope_parameters.mrope_section: got [1, 1, 0], a field that is not"),
        (
            "nemotron_h",
            {"moe_latent_size": 16},
            "moe_latent_size: got 16, expected null: experts on latents (Nemotron-3 Super and Ultra) are not supported",
        ),
        (
            "nemotron_h",
            {"layers_block_type": ["moe", "linear_attention"] * 2},
            "layers_block_type: got 'EMEM', expected layers with Mamba-2 (M), attention (*) and experts (E)",
        ),
        ("nemotron_h", {"n_groups": 3}, "mamba_num_heads: got 4, expected a multiple of n_groups 3"),
        ("nemotron_h", {"conv_kernel": 0}, "conv_kernel: got 0, expected 1 or more"),
        ("nemotron_h", {"time_step_limit": [0.0, 0.1]}, "time_step_limit: got [0.0, 0.1], supported for Nemotron-3"),
        (
            "glm_moe_dsa",
            {"indexer_types": ["shared", "full", "full", "full"]},
            "indexer_types: got ['shared', 'full', 'full', 'full'],",
        ),
        (
            "glm_moe_dsa",
            {"indexer_types": ["full"]},
            "indexer_types: got ['full'], expected 'full' or 'shared' for each of 4 layers",
        ),
        ("glm_moe_dsa", {"layer_types": ["full_attention"] * 4}, "layer_types: got ['full_attention',"),
        (
            "glm_moe_dsa",
            {"first_k_dense_replace": 1},
            "first_k_dense_replace: got 1, expected 2, the number of dense layers in",
        ),
        (
            "glm_moe_dsa",
            {"mlp_layer_types": ["dense", "sparse"] * 2},
            "mlp_layer_types: got ['dense', 'sparse', 'dense', 'sparse'], expected 4 entries, 'dense' before 'sparse'",
        ),
    ],
)
def test_what_does_not_fit_is_refused(model: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"policy.model_name: config.json: {message}")):
        build_transformer_config(
            tiny_policy(), read_config(tmp_path, **{**FAMILY_MODELS[model].config_json(), **changes})
        )


@pytest.mark.parametrize(
    ("model", "quantization"),
    [("deepseek_v3", dict(FP8)), ("gpt_oss", {"quant_method": "mxfp4"})],
    ids=["fp8", "mxfp4"],
)
def test_weights_in_few_bits_are_refused_with_advice(model: str, quantization: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_config(tmp_path, **FAMILY_MODELS[model].config_json(), quantization_config=quantization)
    (problem,) = caught.value.problems
    assert problem.startswith("policy.model_name: config.json: quantization_config: got {")
    assert "write the checkpoint in bfloat16 first" in problem


def llama(tmp_path: Path, **fields: Any) -> Any:
    """Heads of 8, so frequencies of four periods."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
    return read_config(tmp_path, model_type="llama", **sizes, **fields)


def test_plain_positions(tmp_path: Path) -> None:
    for fields in ({"rope_theta": 100.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}):
        hf_config = llama(tmp_path, **fields)
        assert rotary.rotary_base(hf_config) == 100.0
        assert rotary.inverse_frequencies(hf_config) is None
        assert rotary.softmax_scale(hf_config, 8) is None


def test_linear_positions(tmp_path: Path) -> None:
    hf_config = llama(tmp_path, rope_theta=10000.0, rope_scaling={"type": "linear", "factor": 4.0})
    # 10000 ** (-i / 4), a quarter of each.
    torch.testing.assert_close(rotary.inverse_frequencies(hf_config), torch.tensor([1.0, 0.1, 0.01, 0.001]) / 4)
    assert rotary.softmax_scale(hf_config, 8) is None


def test_llama3_positions(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    hf_config = llama(tmp_path, rope_theta=10000.0, rope_scaling=scaling)
    # Wavelengths 2 pi / f: 6.3 is below 128 / 4 and stays, 628 and more are above 128 and are stretched; between
    # them, at 62.8, the two are mixed: (128 / 62.83 - 1) / (4 - 1) of the one.
    share = (128 * 0.1 / (2 * math.pi) - 1) / 3
    expected = torch.tensor([1.0, (1 - share) * 0.1 / 8 + share * 0.1, 0.01 / 8, 0.001 / 8])
    torch.testing.assert_close(rotary.inverse_frequencies(hf_config), expected)
    assert rotary.softmax_scale(hf_config, 8) is None


def test_yarn_positions(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    hf_config = llama(tmp_path, rope_theta=10000.0, rope_scaling=scaling)
    frequencies = rotary.inverse_frequencies(hf_config)
    assert frequencies is not None
    # The fastest stays, the slowest are stretched by 4 (Peng et al. 2023, arXiv:2309.00071, 3.2).
    assert frequencies[0] == 1.0
    torch.testing.assert_close(frequencies[2:], torch.tensor([0.01, 0.001]) / 4)
    # Queries and keys both times 0.1 ln 4 + 1, its section 3.4.
    assert rotary.softmax_scale(hf_config, 8) == pytest.approx((0.1 * math.log(4) + 1) ** 2 / math.sqrt(8))
    scaling["attention_factor"] = 1.5
    assert rotary.softmax_scale(llama(tmp_path, rope_theta=1e4, rope_scaling=scaling), 8) == pytest.approx(
        2.25 / math.sqrt(8)
    )


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"rope_type": "dynamic", "factor": 2.0},
            r"rope_type: got 'dynamic', supported: default, linear, llama3, yarn",
        ),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0},
            r"rope_type: got 'longrope', supported: ",
        ),
        ({"rope_theta": "null"}, r"rope_theta: got 'null', expected a number above 0"),
        ({"rope_theta": 0}, r"rope_theta: got 0, expected a number above 0"),
        (
            {"rope_type": "default", "partial_rotary_factor": 0.5},
            r"rope_parameters.partial_rotary_factor: got 0.5, expected 1.0: the family rotates whole heads",
        ),
        (
            {"rope_type": "linear", "factor": 2.0, "beta_fast": 1.0},
            r"rope_parameters.beta_fast: got 1.0, a field that is not known for rope_type 'linear'",
        ),
    ],
)
def test_other_positions_are_refused(parameters: dict[str, Any], message: str, tmp_path: Path) -> None:
    hf_config = llama(tmp_path, rope_parameters={"rope_theta": 100.0, **parameters})
    with pytest.raises(ConfigurationError, match=f"policy.model_name: config.json: {message}"):
        build_transformer_config(tiny_policy(), hf_config)


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_a_plain_configuration_says_the_same_without_transformers(name: str) -> None:
    """A worker gets it instead of the configuration that transformers reads."""
    hf_config = FAMILY_MODELS[name].hf_config()
    sent = pickle.dumps(plain_config(hf_config))
    assert b"transformers." not in sent, "no class of it is imported where this is read"
    plain = pickle.loads(sent)  # noqa: S301  (of this test)
    assert family_of(plain) is family_of(hf_config)
    assert family_of(plain).transformer_fields(plain) == family_of(hf_config).transformer_fields(hf_config)
    for field, other in hf_config.attribute_map.items():
        assert getattr(plain, field) == getattr(plain, other) == getattr(hf_config, other)
    if not family_of(hf_config).rotates:
        return
    own, frequencies = rotary.inverse_frequencies(hf_config), rotary.inverse_frequencies(plain)
    assert (own is None) == (frequencies is None)
    assert own is None or torch.equal(own, frequencies)


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        (
            "moe_intermediate_size",
            -(2**63) - 1,
            "got -9223372036854775809, expected a whole number from 0 to 10,000,000",
        ),
        ("num_attention_heads", 10**30, f"got 1{'0' * 30}, expected a whole number from 1 to 10,000,000"),
        ("num_hidden_layers", 10**6, "got 1000000, expected a whole number from 1 to 10,000"),
        ("hidden_size", 0, "got 0, expected a whole number from 1 to 10,000,000"),
        ("initializer_range", math.inf, "got inf, expected a finite number"),
    ],
)
def test_numbers_that_no_model_has(name: str, value: float, line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_config(tmp_path, **{"model_type": "qwen3_moe", name: value})
    assert caught.value.problems == [f"policy.model_name: config.json: {name}: {line}"]


def test_an_unknown_field_is_not_shown_whole(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_config(tmp_path, model_type="qwen3_moe", **{"x" * 5000: "y" * 5000})
    assert len(str(caught.value)) < 500
    assert str(caught.value).endswith("take it out if it does not")
