# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The model of a run, checked on the driver before a worker starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_moe.config.schema import MasterConfig
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.data.tokenizer import load_tokenizer
from nemo_rl_moe.loggers.console import ConsoleLogger
from nemo_rl_moe.models.hf_files import ModelSource, check_weights, find_model, load_config_json, load_hf_config
from nemo_rl_moe.models.model_files import collect_model_files

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PreparedModel:
    """What the driver knows of a run's model.

    Attributes:
        source: Where it is read from.
        hf_config: Its Hugging Face configuration.
        tokenizer: The tokenizer in use.
        files: What lies beside exported weights, file name to content.
    """

    source: ModelSource
    hf_config: Any
    tokenizer: "PreTrainedTokenizerBase"
    files: Mapping[str, bytes]


def prepare_model(config: MasterConfig, console: ConsoleLogger) -> PreparedModel:
    """Fetches and checks the model, so that what is wrong with it is told before Ray starts; loads the tokenizer.

    Raises:
        ConfigurationError: The model cannot be had, it, one of its fields or the layout is not supported, its folder
            lacks the weights asked for, or the tokenizer cannot be loaded.
    """
    policy = config.policy
    source, folder = _fetched(policy, console)
    with console.phase("checking the model"):
        hf_config, config_json = load_hf_config(str(folder)), load_config_json(str(folder))
        check_weights(policy, folder)
        # Imported here: Megatron-Core takes seconds to import, which the phase tells.
        from nemo_rl_moe.models.megatron.router_settings import exported_config
        from nemo_rl_moe.models.megatron.transformer_config import build_transformer_config

        transformer = build_transformer_config(policy, hf_config)
        exported = exported_config(policy, hf_config, config_json, transformer)
    for line in model_warnings(policy, hf_config, config_json, transformer):
        console.warn(line)
    tokenizer = load_tokenizer(policy.tokenizer.name, policy.tokenizer.chat_template)
    files = collect_model_files(exported.content, hf_config, folder, tokenizer)
    return PreparedModel(source, hf_config, tokenizer, files)


def model_warnings(
    policy: PolicyConfig, hf_config: Any, config_json: Mapping[str, Any], transformer: "TransformerConfig"
) -> list[str]:
    """What a user should know of the model's settings before a run, a line each.

    Args:
        policy: The `policy` section of the configuration.
        hf_config: The model's Hugging Face configuration.
        config_json: Its file as it is.
        transformer: What `build_transformer_config` made of them.
    """
    from nemo_rl_moe.models.megatron.router_settings import exported_config, setting_warnings

    exported = exported_config(policy, hf_config, config_json, transformer)
    return setting_warnings(policy, hf_config, config_json, transformer) + [
        f"{name}: {getattr(transformer, name)} has no place in a {hf_config.model_type} config.json: exported weights "
        "compute something else in transformers"
        for name in exported.not_expressed
    ]


def _fetched(policy: PolicyConfig, console: ConsoleLogger) -> tuple[ModelSource, Path]:
    """Where the model is, and its folder on this machine."""
    if Path(policy.model_name).is_dir():
        source = find_model(policy)
    else:
        with console.phase(f"fetching {policy.model_name}") as progress:
            source = find_model(policy, progress)
    return source, source.folder()
