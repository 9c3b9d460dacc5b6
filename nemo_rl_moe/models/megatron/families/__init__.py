# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Model families: how a Hugging Face `config.json` and its tensors map to Megatron-Core. One small file a family."""

from collections.abc import Mapping
from typing import Any

from nemo_rl_moe.config.suggestions import did_you_mean, nearest
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.megatron.families import (
    deepseek_v2,
    deepseek_v3,
    gpt_oss,
    llama,
    mistral,
    mixtral,
    olmoe,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from nemo_rl_moe.models.megatron.families.family import ModelFamily

FAMILIES: Mapping[str, ModelFamily] = {
    "deepseek_v2": deepseek_v2.FAMILY,
    "deepseek_v3": deepseek_v3.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "mixtral": mixtral.FAMILY,
    "olmoe": olmoe.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen2_moe": qwen2_moe.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
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
