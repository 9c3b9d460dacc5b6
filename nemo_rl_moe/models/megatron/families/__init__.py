# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Model families: how a Hugging Face `config.json` and its tensors map to Megatron-Core. One small file a family."""

from collections.abc import Mapping
from typing import Any

from nemo_rl_moe.config.suggestions import did_you_mean, nearest
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.megatron.families import qwen3, qwen3_moe
from nemo_rl_moe.models.megatron.families.family import ModelFamily

FAMILIES: Mapping[str, ModelFamily] = {"qwen3": qwen3.FAMILY, "qwen3_moe": qwen3_moe.FAMILY}
"""By the `model_type` of `config.json`."""


def family_of(hf_config: Any) -> ModelFamily:
    """The family that a Hugging Face configuration belongs to.

    Raises:
        ConfigurationError: Its `model_type` is not supported.
    """
    model_type = str(hf_config.model_type)
    if model_type not in FAMILIES:
        supported = ", ".join(sorted(FAMILIES))
        raise ConfigurationError(
            f"policy.model_name: model_type {model_type!r} is not supported; supported: {supported}"
            f"{did_you_mean(nearest(model_type, FAMILIES))}"
        )
    return FAMILIES[model_type]
