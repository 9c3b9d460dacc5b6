# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The longest sequence of a model by the positions in its `config.json`."""

from collections.abc import Mapping
from typing import Any

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.models.families import vision_family_of
from nemo_rl_moe.models.families.vision import decoder_section

_EXTENDED = ("linear", "dynamic", "yarn")
"""Types of rotary scaling whose original length may be missing. The original length is then
`max_position_embeddings`."""


def position_limit(config_json: Mapping[str, Any]) -> int | None:
    """Return the maximum number of positions of a model, or None if its `config.json` does not contain it.

    With rotary scaling, the maximum is the larger of `max_position_embeddings` and `factor` times the original number
    of positions: some families write the product into `max_position_embeddings`, and others the original number.
    """
    config_json = decoder_section(config_json, vision_family_of(config_json))
    stated = config_json.get("max_position_embeddings")
    if not isinstance(stated, int):
        return None
    scaling = config_json.get("rope_parameters") or config_json.get("rope_scaling")
    if not isinstance(scaling, Mapping):
        return stated
    kind, factor = scaling.get("rope_type") or scaling.get("type"), scaling.get("factor")
    original = scaling.get("original_max_position_embeddings") or (stated if kind in _EXTENDED else None)
    if not isinstance(factor, int | float) or not isinstance(original, int):
        return stated
    return max(stated, int(original * factor))


def too_long_sequences(policy: PolicyConfig, config_json: Mapping[str, Any]) -> list[str]:
    """Return a line if sequences may be longer than the model allows, otherwise an empty list."""
    limit, longest = position_limit(config_json), policy.max_total_sequence_length
    if limit is None or longest <= limit:
        return []
    return [
        f"policy.max_total_sequence_length: got {longest}, expected at most {limit}, the positions of"
        f" {policy.model_name} by its config.json"
    ]
