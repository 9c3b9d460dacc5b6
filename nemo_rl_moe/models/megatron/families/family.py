# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What a model family has to say about itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# Canonical parameter names are Megatron-Core's own with two changes, so that they do not depend on the layout or on the
# modules in use: layer and expert numbers are global; an expert's weight is `mlp.experts.{expert}.linear_fc1.weight`.
ToHuggingFace = Callable[[str, Tensor, Any], Mapping[str, Tensor]]
FromHuggingFace = Callable[[str, Callable[[str], Tensor], Any], Tensor]


@dataclass(frozen=True)
class ModelFamily:
    """How one Hugging Face model type maps to Megatron-Core.

    Attributes:
        transformer_fields: From the Hugging Face configuration to TransformerConfig fields (without the layout).
        rotary_base: Base period of the rotary position embedding.
        to_hugging_face: (canonical name, full tensor, hf_config) to Hugging Face names and tensors.
        from_hugging_face: (canonical name, reader of a tensor by its Hugging Face name, hf_config) to the full tensor.
    """

    transformer_fields: Callable[[Any], dict[str, Any]]
    rotary_base: Callable[[Any], float]
    to_hugging_face: ToHuggingFace
    from_hugging_face: FromHuggingFace
