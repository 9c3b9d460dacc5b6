# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Model families: how a Hugging Face `config.json` and its tensors map to Megatron-Core. One small file a family."""

from typing import Any

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.megatron.families import qwen3, qwen3_moe
from nemo_rl_moe.models.megatron.families.family import ModelFamily

_FAMILIES: dict[str, ModelFamily] = {"qwen3": qwen3.FAMILY, "qwen3_moe": qwen3_moe.FAMILY}


def family_of(hf_config: Any) -> ModelFamily:
    """The family that a Hugging Face configuration belongs to.

    Raises:
        ConfigurationError: Its `model_type` is not supported.
    """
    model_type = str(hf_config.model_type)
    if model_type not in _FAMILIES:
        supported = ", ".join(sorted(_FAMILIES))
        raise ConfigurationError(
            f"policy.model_name: model_type {model_type!r} is not supported; supported: {supported}"
        )
    return _FAMILIES[model_type]
