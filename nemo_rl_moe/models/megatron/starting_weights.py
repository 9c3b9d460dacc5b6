# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The weights that a model starts with: random ones, those of Hugging Face files, or those of a checkpoint."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nemo_rl_moe.models.hf_files import MEGATRON_WEIGHTS_FOLDER, holds_megatron_weights
from nemo_rl_moe.models.megatron.checkpoint.load import load_model
from nemo_rl_moe.models.megatron.hf_import import load_weights
from nemo_rl_moe.models.megatron.random_init import initialize_weights

# isort: split
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig


def set_starting_weights(
    chunks: Sequence[GPTModel],
    config: TransformerConfig,
    hf_config: Any,
    folder: Path | None,
    init_seed: int,
    progress: Callable[[float], None] = lambda share: None,
) -> list[str]:
    """Fills every parameter. Every rank calls it.

    Args:
        chunks: This rank's model chunks.
        config: Their configuration.
        hf_config: The model's Hugging Face configuration.
        folder: Where weights are read from; None for random ones.
        init_seed: Seed of random weights.
        progress: Gets the share that has been read of Hugging Face files.

    Returns:
        What a user should know of it, a line each; the same on every rank.

    Raises:
        UserError: The folder's weights cannot be used; the same on every rank.
    """
    if folder is None:
        initialize_weights(chunks, config, hf_config, init_seed)
        return []
    if holds_megatron_weights(folder):
        load_model(chunks, folder / MEGATRON_WEIGHTS_FOLDER)
        return []
    return list(load_weights(chunks, config, hf_config, folder, progress))
