# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Models whose sequences can share the computation of a common prefix (`policy.shared_prefix`)."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.models.layer_kinds import recurrent_mixer


def problems_with_shared_prefix(policy: PolicyConfig, fields: Mapping[str, Any], *, has_vision: bool) -> list[str]:
    """Return the parts of a model that need separate sequences, if the policy shares prefixes.

    Args:
        fields: The model's fields of TransformerConfig.
    """
    if policy.shared_prefix is False:
        return []
    mixer = recurrent_mixer(SimpleNamespace(**fields))
    found = ([] if mixer is None else [mixer.value]) + (["images"] if has_vision else [])
    got = str(policy.shared_prefix).lower()
    return [f"policy.shared_prefix: got {got}, expected false for a model with {name}" for name in found]
