# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Model families: how a Hugging Face `config.json` and its tensors map to Megatron-Core. One small file a family."""

from collections.abc import Mapping
from typing import Any

from nemo_rl_moe.config.suggestions import did_you_mean, nearest
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.families import deepseek, dense, gpt_oss, softmax_moe
from nemo_rl_moe.models.families.rules import ModelFamily

FAMILIES: Mapping[str, ModelFamily] = {
    "deepseek_v2": deepseek.DEEPSEEK_V2,
    "deepseek_v3": deepseek.DEEPSEEK_V3,
    "gpt_oss": gpt_oss.GPT_OSS,
    "llama": dense.LLAMA,
    "mistral": dense.MISTRAL,
    "mixtral": softmax_moe.MIXTRAL,
    "olmoe": softmax_moe.OLMOE,
    "qwen2": dense.QWEN2,
    "qwen2_moe": softmax_moe.QWEN2_MOE,
    "qwen3": dense.QWEN3,
    "qwen3_moe": softmax_moe.QWEN3_MOE,
}
"""By the `model_type` of `config.json`."""


def family_of(hf_config: Any) -> ModelFamily:
    """The family that a Hugging Face configuration belongs to.

    Raises:
        ConfigurationError: Its `model_type` is not supported.
    """
    return family_of_type(hf_config.model_type)


def family_of_type(model_type: Any) -> ModelFamily:
    """The family of a `model_type`.

    Raises:
        ConfigurationError: It is not supported.
    """
    found = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if found is None:
        supported = ", ".join(sorted(FAMILIES))
        raise ConfigurationError(
            f"policy.model_name: config.json: model_type {model_type!r} is not supported; supported: {supported}"
            f"{did_you_mean(nearest(str(model_type), FAMILIES))}"
        )
    return found
