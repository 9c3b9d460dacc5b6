# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What the families make of `config.json`: of released models, of stretched positions, of what is not supported."""

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.families import FAMILIES, family_of
from nemo_rl_moe.models.families import decoder as rotary
from nemo_rl_moe.models.families.refused import REFUSED
from nemo_rl_moe.models.hf_files import load_hf_config, plain_config
from nemo_rl_moe.models.megatron.model.memory_estimate import whole_model_parameters
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config
from tests.support.family_models import FAMILY_MODELS
from tests.support.published_configs import PUBLISHED_CONFIGS
from tests.support.tiny_model import tiny_policy


def read_config(folder: Path, **fields: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(fields))
    return load_hf_config(str(folder))


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
    "gpt-oss-120b": {"num_layers": 36, "num_moe_experts": 128, "moe_router_topk": 4, "moe_ffn_hidden_size": 2880},
    "Qwen3-235B-A22B": {"num_layers": 94, "moe_ffn_hidden_size": 1536, "num_query_groups": 4},
}


@pytest.mark.parametrize("name", PUBLISHED_CONFIGS)
def test_released_models_are_understood(name: str, tmp_path: Path) -> None:
    published = PUBLISHED_CONFIGS[name]
    hf_config = read_config(tmp_path, **published.config_json)
    config = build_transformer_config(tiny_policy(), hf_config)
    assert {field: getattr(config, field) for field in EXPECTED_FIELDS[name]} == EXPECTED_FIELDS[name]
    assert family_of(hf_config).rotary_base(hf_config) == published.config_json["rope_theta"]
    assert whole_model_parameters(config, hf_config) == published.num_parameters


def test_coefficient_of_the_auxiliary_loss_comes_from_the_model() -> None:
    hf_config = FAMILY_MODELS["mixtral"].hf_config()
    fields = family_of(hf_config).transformer_fields(hf_config)
    assert (fields["moe_aux_loss_coeff"], fields["moe_router_load_balancing_type"]) == (0.001, "aux_loss")
    hf_config.router_aux_loss_coef = 0.0
    fields = family_of(hf_config).transformer_fields(hf_config)
    assert (fields["moe_aux_loss_coeff"], fields["moe_router_load_balancing_type"]) == (0.0, "none")


def test_other_families_are_refused(tmp_path: Path) -> None:
    expected = r"config.json: model_type 'gemma' is not supported; supported: .*mixtral, olmoe, qwen2, "
    with pytest.raises(ConfigurationError, match=expected):
        read_config(tmp_path, model_type="gemma")


@pytest.mark.parametrize("model_type", REFUSED)
def test_families_that_cannot_work_are_refused_by_name(model_type: str, tmp_path: Path) -> None:
    refused = REFUSED[model_type]
    assert refused.nearest in FAMILIES
    assert model_type in CONFIG_MAPPING
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
    ],
)
def test_unsupported_value_is_named(model: str, field: str, value: Any, supported: str, tmp_path: Path) -> None:
    fields = FAMILY_MODELS[model].config_json()
    with pytest.raises(ConfigurationError) as caught:
        read_config(tmp_path, **{**fields, field: value})
    (problem,) = caught.value.problems
    assert problem.startswith(f"policy.model_name: config.json: {field}: got {value!r}, supported for ")
    assert problem.endswith(f": {supported}")


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
    own, frequencies = rotary.inverse_frequencies(hf_config), rotary.inverse_frequencies(plain)
    assert (own is None) == (frequencies is None)
    assert own is None or torch.equal(own, frequencies)
    for field, other in hf_config.attribute_map.items():
        assert getattr(plain, field) == getattr(plain, other) == getattr(hf_config, other)


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
