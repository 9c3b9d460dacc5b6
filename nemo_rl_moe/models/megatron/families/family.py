# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What a model family has to say about itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_rl_moe.models.megatron.families.config_fields import ConfigFields
from nemo_rl_moe.models.megatron.families.rules import RuleTable


def _none_unused(hf_config: Any) -> Mapping[str, str]:
    del hf_config
    return {}


@dataclass(frozen=True)
class ModelFamily:
    """How one Hugging Face model type maps to Megatron-Core.

    Attributes:
        name: For people.
        transformer_fields: From the Hugging Face configuration to TransformerConfig fields (without the layout).
        rotary_base: Base period of the rotary position embedding.
        rules: Parameters and their tensors.
        config_fields: Which fields of `config.json` mean something here.
        router_fields: TransformerConfig's router fields that the model decides about, to the field of `config.json`
            that each comes from; None where the architecture leaves no choice.
        unused_tensors: Regular expressions of tensors that a checkpoint may hold and the model has no use for, each
            with why. A whole name must match.
        exported_fields: Fields of an exported `config.json` that say that the tensors left out are not there.
        change_block: Puts the family's own modules into a block's layer specs: (config, block) to block.
    """

    name: str
    transformer_fields: Callable[[Any], dict[str, Any]]
    rotary_base: Callable[[Any], float]
    rules: RuleTable
    config_fields: ConfigFields
    router_fields: Mapping[str, str | None]
    unused_tensors: Callable[[Any], Mapping[str, str]] = _none_unused
    exported_fields: Mapping[str, Any] = field(default_factory=dict)
    change_block: Callable[[Any, Any], Any] | None = None
