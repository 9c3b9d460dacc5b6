# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoder layers that add a vision tower's features to their output.

The block gets the features as its `context`, which is otherwise unused. Activation checkpointing treats `context` as an
input, so recomputed passes get the features again, and the features' gradients flow to the tower.
"""

import dataclasses
from typing import Any

from jaxtyping import Float
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class DeepLayer(TransformerLayer):
    """A decoder layer that adds the vision features `context[layer]` to its output.

    `context` is the input for cross-attention in Megatron-Core's layer. This layer has no cross-attention.
    """

    def forward(
        self, *args: Any, context: Float[Tensor, "layers columns rows hidden"] | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        hidden_states, _ = super().forward(*args, **kwargs)
        if context is None:
            return hidden_states, None
        is_last = self.layer_number == len(context)
        return hidden_states + context[self.layer_number - 1], None if is_last else context


def use_deep_layers(block: TransformerBlockSubmodules, num_layers: int) -> TransformerBlockSubmodules:
    """Return a copy of the layer specs of a model's first block in which the first `num_layers` are `DeepLayer`s."""
    first, others = block.layer_specs[:num_layers], block.layer_specs[num_layers:]
    return dataclasses.replace(block, layer_specs=[*map(_deep, first), *others])


def _deep(layer_spec: ModuleSpec) -> ModuleSpec:
    assert layer_spec.module is TransformerLayer
    return dataclasses.replace(layer_spec, module=DeepLayer)
