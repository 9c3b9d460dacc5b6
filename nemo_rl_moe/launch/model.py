# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The model of a run, checked on the driver before a worker starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_rl_moe.config.schema import MasterConfig
from nemo_rl_moe.data.tokenizer import load_tokenizer
from nemo_rl_moe.loggers.console import ConsoleLogger
from nemo_rl_moe.models.hf_files import check_weights, load_config_json, load_hf_config
from nemo_rl_moe.models.model_files import collect_model_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PreparedModel:
    """What the driver knows of a run's model.

    Attributes:
        hf_config: Its Hugging Face configuration.
        tokenizer: The tokenizer in use.
        files: What lies beside exported weights, file name to content.
    """

    hf_config: Any
    tokenizer: "PreTrainedTokenizerBase"
    files: Mapping[str, bytes]


def prepare_model(config: MasterConfig, console: ConsoleLogger) -> PreparedModel:
    """Checks the model, so that whatever is wrong with it is told before Ray starts, and loads the tokenizer.

    Raises:
        ConfigurationError: The model, one of its fields or the layout is not supported, its folder lacks the weights
            asked for, or the tokenizer cannot be loaded.
    """
    policy = config.policy
    with console.phase("checking the model"):
        hf_config, config_json = load_hf_config(policy.model_name), load_config_json(policy.model_name)
        check_weights(policy)
        # Imported here: Megatron-Core takes seconds to import, which the phase tells.
        from nemo_rl_moe.models.megatron.router_settings import exported_config, setting_warnings
        from nemo_rl_moe.models.megatron.transformer_config import build_transformer_config

        transformer = build_transformer_config(policy, hf_config)
        exported = exported_config(hf_config, config_json, transformer, policy.precision)
    for line in setting_warnings(policy, hf_config, config_json, transformer):
        console.warn(line)
    for name in exported.not_expressed:
        console.warn(
            f"{name}: {getattr(transformer, name)} has no place in a {hf_config.model_type} config.json: exported "
            "weights compute something else in transformers"
        )
    tokenizer = load_tokenizer(policy.tokenizer.name, policy.tokenizer.chat_template)
    files = collect_model_files(exported.content, hf_config, policy.model_name, tokenizer)
    return PreparedModel(hf_config, tokenizer, files)
