# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Model families: the mapping of a Hugging Face `config.json` and its tensors to Megatron-Core."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from nemo_rl_moe.config.suggestions import did_you_mean, nearest
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.families import (
    deepseek,
    dense,
    dots_solar,
    glm,
    gpt_oss,
    internvl,
    minimax,
    nemotron,
    qwen3_5_vision,
    qwen_next,
    qwen_vl,
    softmax_moe,
    sparse_attention,
)
from nemo_rl_moe.models.families.refused import REFUSED
from nemo_rl_moe.models.families.rules import ModelFamily
from nemo_rl_moe.models.families.vision import VisionFamily, decoder_section

FAMILIES: Mapping[str, ModelFamily] = {
    "deepseek_v2": deepseek.DEEPSEEK_V2,
    "deepseek_v3": deepseek.DEEPSEEK_V3,
    "deepseek_v32": sparse_attention.DEEPSEEK_V32,
    "dots1": dots_solar.DOTS1,
    "glm4_moe": glm.GLM4_MOE,
    "glm4_moe_lite": glm.GLM4_MOE_LITE,
    "glm_moe_dsa": sparse_attention.GLM_MOE_DSA,
    "gpt_oss": gpt_oss.GPT_OSS,
    "kimi_k2": deepseek.KIMI_K2,
    "llama": dense.LLAMA,
    "minimax_m2": minimax.MINIMAX_M2,
    "mistral": dense.MISTRAL,
    "mixtral": softmax_moe.MIXTRAL,
    "nemotron_h": nemotron.NEMOTRON_H,
    "olmoe": softmax_moe.OLMOE,
    "qwen2": dense.QWEN2,
    "qwen2_moe": softmax_moe.QWEN2_MOE,
    "qwen3": dense.QWEN3,
    "qwen3_5_moe_text": qwen_next.QWEN3_5_MOE_TEXT,
    "qwen3_5_text": qwen_next.QWEN3_5_TEXT,
    "qwen3_moe": softmax_moe.QWEN3_MOE,
    "qwen3_next": qwen_next.QWEN3_NEXT,
    "solar_open": dots_solar.SOLAR_OPEN,
}


VISION_FAMILIES: Mapping[str, VisionFamily] = {
    "internvl": internvl.INTERNVL,
    "qwen2_5_vl": qwen_vl.QWEN2_5_VL,
    "qwen3_5": qwen3_5_vision.QWEN3_5,
    "qwen3_5_moe": qwen3_5_vision.QWEN3_5_MOE,
    "qwen3_vl": qwen_vl.QWEN3_VL,
    "qwen3_vl_moe": qwen_vl.QWEN3_VL_MOE,
}
"""`model_type` of `config.json` -> family of vision-language models."""

_DEFAULT_DECODER = "qwen2"
"""transformers' default for a `text_config` without `model_type`."""
# A cache, because the family is looked up for each parameter.
_with_towers: dict[tuple[str, str], tuple[ModelFamily, ModelFamily]] = {}


def family_of(hf_config: Any) -> ModelFamily:
    """Return the family of a Hugging Face configuration.

    Requires that the configuration of a vision-language model is flattened (`VisionFamily.flattened`).
    """
    vision = VISION_FAMILIES.get(hf_config.model_type)
    if vision is None:
        return family_of_type(hf_config.model_type)
    key = (hf_config.model_type, hf_config.decoder_type)
    decoder = vision.decoder or family_of_type(hf_config.decoder_type, "text_config.")
    if key not in _with_towers or _with_towers[key][0] is not decoder:
        _with_towers[key] = (decoder, vision.around(decoder))
    return _with_towers[key][1]


def num_patches_of(hf_config: Any) -> Callable[[int, int], int] | None:
    """Return a function of an image's height and width in pixels that returns its number of patches.

    None for a text model.
    """
    vision = family_of(hf_config).vision
    return None if vision is None else partial(vision.num_patches, hf_config)


def vision_family_of(config_json: Mapping[str, Any]) -> VisionFamily | None:
    """Return the vision-language family of a `config.json`, or None for a text model or an unsupported type."""
    model_type = config_json.get("model_type")
    return VISION_FAMILIES.get(model_type) if isinstance(model_type, str) else None


def decoder_type_of(config_json: Mapping[str, Any]) -> Any:
    """Return the `model_type` of a vision-language model's decoder."""
    return decoder_section(config_json, vision_family_of(config_json)).get("model_type", _DEFAULT_DECODER)


def family_of_type(model_type: Any, section: str = "") -> ModelFamily:
    """Return the family of a `model_type` of a text model or decoder. Messages prefix the field with `section`."""
    found = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if found is None:
        if (refused := REFUSED.get(str(model_type))) is not None:
            raise ConfigurationError(
                f"policy.model_name: config.json: {section}model_type {model_type!r} ({refused.name}) is not supported:"
                f" it needs {refused.why}; the nearest family that is supported: {refused.nearest}"
            )
        families = FAMILIES.keys() | (set() if section else VISION_FAMILIES.keys())
        raise ConfigurationError(
            f"policy.model_name: config.json: {section}model_type {model_type!r} is not supported; supported: "
            f"{', '.join(sorted(families))}{did_you_mean(nearest(str(model_type), families))}"
        )
    return found
