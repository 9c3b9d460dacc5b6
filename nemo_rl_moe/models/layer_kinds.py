# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What each decoder layer consists of: the part that mixes tokens, and the MLP. Imports nothing of Megatron-Core.

A layer of Megatron-Core has both parts. In hybrid models such as Nemotron-3 it has one of them. Their TransformerConfig
has the attribute `layer_pattern`, with a letter for each layer, as Megatron-Core writes such models.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any

LAYER_PATTERN = "layer_pattern"
"""Attribute of TransformerConfig with the letters of `LETTERS`, one for each layer. None if layers have both parts."""


class Mixer(Enum):
    """Part of a layer that mixes the tokens of a sequence. The values are its names in messages."""

    ATTENTION = "attention"
    DELTA_NET = "gated delta nets"
    MAMBA = "Mamba-2 layers"


LETTERS: Mapping[str, Mixer | None] = {"M": Mixer.MAMBA, "*": Mixer.ATTENTION, "E": None, "-": None}
"""Letter of a layer with one part -> its mixer. `E` has experts instead, `-` a dense MLP."""
RECURRENT = frozenset({Mixer.DELTA_NET, Mixer.MAMBA})
"""Mixers whose state passes from token to token."""


def mixers_of(config: Any) -> list[Mixer | None]:
    """Return the mixer of each layer, None for a layer without one."""
    if (pattern := getattr(config, LAYER_PATTERN, None)) is not None:
        return [LETTERS[letter] for letter in pattern]
    linear = getattr(config, "linear_attention_freq", None) or [0] * config.num_layers
    return [Mixer.DELTA_NET if is_linear else Mixer.ATTENTION for is_linear in linear]


def layers_with_mlp(config: Any) -> list[int]:
    """Return the indices of the layers with a dense MLP or experts (0-based)."""
    pattern = getattr(config, LAYER_PATTERN, None) or "E" * config.num_layers
    return [index for index, letter in enumerate(pattern) if letter in "E-"]


def recurrent_mixer(config: Any) -> Mixer | None:
    """Return the mixer of the layers with a recurrent state, of which a model has one kind, or None without any."""
    return next((mixer for mixer in mixers_of(config) if mixer in RECURRENT), None)


def num_residual_branches(config: Any) -> int:
    """Return how many parts of layers add to the residual stream."""
    return len(layers_with_mlp(config)) + sum(mixer is not None for mixer in mixers_of(config))
