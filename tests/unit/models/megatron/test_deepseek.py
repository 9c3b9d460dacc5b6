# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What DeepSeek's families make of `config.json`: groups, YaRN, layers for further tokens, latents."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.families import biased_routers, deepseek, family_of
from nemo_rl_moe.models.hf_files import load_hf_config
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config
from tests.support.family_models import FAMILY_MODELS
from tests.support.published_configs import DEEPSEEK_CONFIGS
from tests.support.tiny_model import layout, tiny_policy


def read_config(folder: Path, **fields: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(fields))
    return load_hf_config(str(folder))


YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 32}


def test_mtp_layers_are_kept(tmp_path: Path) -> None:
    hf_config = read_config(tmp_path, **DEEPSEEK_CONFIGS["DeepSeek-V3"].config_json)
    (pattern,) = family_of(hf_config).kept_tensors(hf_config)
    assert re.fullmatch(pattern, "model.layers.61.eh_proj.weight")
    assert re.fullmatch(pattern, "model.layers.61.mlp.experts.3.gate_proj.weight")
    assert not re.fullmatch(pattern, "model.layers.6.mlp.gate.weight")
    assert not re.fullmatch(pattern, "model.layers.60.mlp.gate.weight")
    hf_config = read_config(tmp_path, **DEEPSEEK_CONFIGS["Moonlight-16B-A3B"].config_json)
    assert family_of(hf_config).kept_tensors(hf_config) == []


def test_fused_routing_is_refused_where_it_would_choose_other_groups() -> None:
    with pytest.raises(ConfigurationError, match="moe_router_fusion: got true, but its kernel chooses groups"):
        build_transformer_config(tiny_policy(moe_router_fusion=True), FAMILY_MODELS["deepseek_v2_groups"].hf_config())


def test_groups_that_limit_nothing_are_left_out() -> None:
    hf_config = FAMILY_MODELS["deepseek_v3"].hf_config()
    assert biased_routers.group_fields(hf_config) == {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
    hf_config.topk_group = 4
    assert biased_routers.group_fields(hf_config) == {"moe_router_num_groups": None, "moe_router_group_topk": None}


def test_kind_of_auxiliary_loss() -> None:
    hf_config = FAMILY_MODELS["deepseek_v2"].hf_config()
    found = []
    for coefficient, over_sequences in ((None, True), (0.0, True), (0.003, True), (0.003, False)):
        hf_config.aux_loss_alpha, hf_config.seq_aux = coefficient, over_sequences
        fields = family_of(hf_config).transformer_fields(hf_config)
        found.append((fields["moe_router_load_balancing_type"], fields["moe_aux_loss_coeff"]))
    assert found == [("none", 0.0), ("none", 0.0), ("seq_aux_loss", 0.003), ("aux_loss", 0.003)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mscale": 0.7, "mscale_all_dim": 0.4},
        {"mscale": 0.7},
        {"mscale_all_dim": 0.7},
        {"attention_factor": 1.3},
        {"attention_factor": 1.3, "mscale": 0.7, "mscale_all_dim": 0.4},
        {"factor": 1.0, "mscale": 0.7, "mscale_all_dim": 0.4},
        {"beta_fast": 4, "beta_slow": 0.5},
    ],
)
def test_rotation_and_scale_are_those_of_transformers(changes: dict[str, Any]) -> None:
    """By Megatron-Core's own functions, from the fields that it is given."""
    from megatron.core.models.common.embeddings import YarnRotaryEmbedding, _yarn_get_mscale
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import yarn_apply_mscale

    hf_config = FAMILY_MODELS["deepseek_v3"].hf_config()
    hf_config.rope_parameters = dict(YARN, **changes)
    hf_config.qk_rope_head_dim = hf_config.head_dim = 16
    fields = deepseek.rotary_fields(hf_config)
    scale = _yarn_get_mscale(fields["rotary_scaling_factor"], fields["mscale_all_dim"]) ** 2 / math.sqrt(24)
    assert scale == pytest.approx(yarn_apply_mscale(hf_config.rope_parameters, 24**-0.5))
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](hf_config)
    names = ("rotary_base", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    rotary = YarnRotaryEmbedding(
        16, **{name: fields[name] for name in names}, scaling_factor=fields["rotary_scaling_factor"]
    )
    angles, found_factor = rotary(100)
    assert found_factor == pytest.approx(factor)
    torch.testing.assert_close(angles[99, 0, 0, :8], 99 * expected)


def test_plain_rotation_leaves_the_scores_alone() -> None:
    hf_config = FAMILY_MODELS["deepseek_v3"].hf_config()
    hf_config.rope_parameters = {"rope_type": "default", "rope_theta": 1000.0}
    fields = deepseek.rotary_fields(hf_config)
    # The square of 0.1 x 0 x ln(1) + 1.
    assert (fields["rope_type"], fields["rotary_scaling_factor"], fields["mscale_all_dim"]) == ("rope", 1.0, 0.0)


def test_latents_that_cannot_be_cut_are_named_before_anything_starts() -> None:
    """Megatron-Core ends in a bare AssertionError there."""
    hf_config = FAMILY_MODELS["deepseek_v3"].hf_config()
    hf_config.q_lora_rank, hf_config.kv_lora_rank = 11, 9
    hf_config.qk_rope_head_dim = 4
    with pytest.raises(ConfigurationError) as caught:
        build_transformer_config(tiny_policy(2, **layout(tp=2)), hf_config)
    key = "policy.megatron_cfg.tensor_model_parallel_size: got 2, which does not divide the model's"
    assert caught.value.problems == [
        f"{key} 11 query latents (q_lora_rank)",
        f"{key} 13 key and value latents (kv_lora_rank + qk_rope_head_dim)",
    ]
