# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters in a conversion: read beside their base, then merged into it, or written as peft reads them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from nemo_rl_moe.checkpoints.state import read_state
from nemo_rl_moe.config.schema_lora import LoraConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.hf_files import MEGATRON_WEIGHTS_FOLDER, holds_megatron_weights
from nemo_rl_moe.models.peft_files import ADAPTER_FOLDER, CONFIG_FILE, lora_of_folder

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig


def describe_adapter(folder: Path) -> LoraConfig:
    """Return the section `policy.lora` of an adapter: of peft's, of a run's final weights, or of its checkpoint.

    Raises:
        ConfigurationError: There is none.
    """
    if holds_megatron_weights(folder):
        section = read_state(folder).config.get("policy", {}).get("lora")
        if section is None:
            raise ConfigurationError(f"--adapter: {folder} is a checkpoint of a run without policy.lora")
        try:
            return LoraConfig.model_validate({**section, "path": None})
        except ValidationError as error:
            raise ConfigurationError(f"--adapter: {folder}: state.json: policy.lora: {error}") from None
    return lora_of_folder(_folder_of_peft(folder))


def _folder_of_peft(folder: Path) -> Path:
    inner = folder / ADAPTER_FOLDER
    return inner if not (folder / CONFIG_FILE).is_file() and inner.is_dir() else folder


def put_in_adapter(
    chunks: "Sequence[GPTModel]", config: "TransformerConfig", hf_config: Any, folder: Path, lora: LoraConfig
) -> None:
    """Put an adapter beside the layers of a model whose weights have been read.

    Raises:
        UserError: It does not fit the model, or cannot be read.
    """
    from nemo_rl_moe.models.families.linear_targets import target_problems
    from nemo_rl_moe.models.megatron.checkpoint.load import load_model
    from nemo_rl_moe.models.megatron.lora.attach import add_adapters
    from nemo_rl_moe.models.megatron.lora.peft_folder import load_adapter

    if problems := target_problems(lora, hf_config):
        raise ConfigurationError(problems)
    add_adapters(chunks, config, hf_config, lora, seed=0)
    if holds_megatron_weights(folder):
        load_model(chunks, folder / MEGATRON_WEIGHTS_FOLDER)
    else:
        load_adapter(chunks, _folder_of_peft(folder), lora.rank, hf_config)
