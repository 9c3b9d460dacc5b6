# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding over whole heads, and the ways in which models stretch it to longer sequences.

The frequencies of a stretched one are transformers' own. What YaRN multiplies cosines and sines with, queries and keys
both carry: together it is a factor of the scores, its square.
"""

import copy
from collections.abc import Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.megatron.families.config_fields import field_names

_KNOWN_KEYS: Mapping[str, frozenset[str]] = {
    "default": field_names(""),
    "linear": field_names("factor"),
    "llama3": field_names("factor low_freq_factor high_freq_factor original_max_position_embeddings"),
    "yarn": field_names(
        "factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim truncate"
    ),
}
"""By `rope_type`, the keys of `rope_parameters` that mean something, besides `rope_type` and `rope_theta`."""
_ALWAYS_KNOWN = field_names("rope_type type rope_theta")


def rotary_base(hf_config: Any) -> float:
    """Base period of the rotary embedding.

    Raises:
        ConfigurationError: The positions are scaled in a way that is not supported.
    """
    return float(_rope_parameters(hf_config)["rope_theta"])


def inverse_frequencies(hf_config: Any) -> Float[Tensor, " half_head"] | None:
    """Inverse frequencies of stretched positions; None for those that follow from the base alone.

    Raises:
        ConfigurationError: As `rotary_base`.
    """
    return _stretched(hf_config)[0]


def softmax_scale(hf_config: Any, head_dim: int) -> float | None:
    """Factor of the scores; None for the usual `head_dim ** -0.5`.

    Raises:
        ConfigurationError: As `rotary_base`.
    """
    factor = _stretched(hf_config)[1]
    return None if factor == 1.0 else float(factor**2 * head_dim**-0.5)


def _stretched(hf_config: Any) -> tuple[Tensor | None, float]:
    """Inverse frequencies, and the factor of cosines and sines."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = _rope_parameters(hf_config)["rope_type"]
    if kind == "default":
        return None, 1.0
    if getattr(hf_config, "head_dim", 0) is None:
        # transformers' functions take a size that is there for one that is known.
        hf_config = copy.copy(hf_config)
        hf_config.head_dim = hf_config.hidden_size // hf_config.num_attention_heads
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](hf_config)
    return frequencies, float(factor)


def _rope_parameters(hf_config: Any) -> Mapping[str, Any]:
    parameters: dict[str, Any] = {"rope_type": "default", **hf_config.rope_parameters}
    kind = parameters["rope_type"]
    if kind not in _KNOWN_KEYS:
        raise ConfigurationError(
            f"policy.model_name: config.json: rope_type: got {kind!r}, supported: {', '.join(sorted(_KNOWN_KEYS))}"
        )
    if parameters.get("partial_rotary_factor") == 1.0:
        del parameters["partial_rotary_factor"]
    unknown = parameters.keys() - _KNOWN_KEYS[kind] - _ALWAYS_KNOWN
    if unknown:
        key = "policy.model_name: config.json: rope_parameters"
        raise ConfigurationError(
            [
                f"{key}.{name}: got {parameters[name]!r}, a field that is not known for rope_type {kind!r} and could "
                "change what the model computes"
                for name in sorted(unknown)
            ]
        )
    return parameters
