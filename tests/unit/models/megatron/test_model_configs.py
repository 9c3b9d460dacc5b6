# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Published configurations of examples/assets: `plan` counts what transformers builds, and what the card says."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from nemo_rl_moe.models.families import family_of
from nemo_rl_moe.models.hf_files import load_config_json, load_hf_config
from nemo_rl_moe.models.megatron.model.memory_estimate import whole_model_parameters
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config
from tests.support.tiny_model import tiny_policy

CARDS = {
    "GLM-4.5-Air": 106,
    "GLM-4.7-Flash": 30,
    "MiniMax-M2": 230,
    "Kimi-K2-Instruct": 1000,
    "DeepSeek-V3.2": 671,
    "GLM-5": 744,
    "Qwen3-Next-80B-A3B-Instruct": 80,
    "Qwen3.5-35B-A3B-text": 35,
    "Qwen3.5-27B-text": 27,
    "Qwen3.5-35B-A3B": 35,
    "dots.llm1.inst": 142,
    "Solar-Open-100B": 102,
    "NVIDIA-Nemotron-3-Nano-30B-A3B": 31.6,
}
"""Billions of parameters, as the models' cards have them."""


@pytest.mark.parametrize("name", CARDS)
def test_parameters_are_those_of_transformers_and_of_the_card(name: str) -> None:
    folder = f"examples/assets/model_configs/{name}"
    hf_config, fields = load_hf_config(folder), load_config_json(folder)
    known_type = family_of(hf_config).transformers_type or hf_config.model_type
    with torch.device("meta"):
        fields = {key: value for key, value in fields.items() if key != "model_type"}
        kind = AutoModelForImageTextToText if "vision_config" in fields else AutoModelForCausalLM
        model = kind.from_config(AutoConfig.for_model(known_type, **fields))
    counted = whole_model_parameters(build_transformer_config(tiny_policy(), hf_config), hf_config)
    assert counted == sum(parameter.numel() for parameter in model.parameters())
    assert counted / 1e9 == pytest.approx(CARDS[name], rel=0.03)
