# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds a model's Hugging Face files: configuration and weights; a local folder or a hub's name."""

from pathlib import Path
from typing import Any

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.errors import ConfigurationError


def load_hf_config(model_name: str) -> Any:
    """The model's `config.json`. Code from the hub is never run.

    Raises:
        ConfigurationError: There is none, or it cannot be read.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model_name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, OSError) and not Path(model_name).is_dir():
            raise ConfigurationError(
                f"policy.model_name: got {model_name!r}, which is no folder here and cannot be had from the hub "
                "(no network, no such model, or no access); a folder with the model's config.json will do"
            ) from error
        reason = " ".join(str(error).split())
        raise ConfigurationError(
            f"policy.model_name: cannot read the configuration of {model_name!r}: {reason}"
        ) from error


def weights_folder(policy: PolicyConfig) -> Path | None:
    """The folder that the policy's weights are read from; None where it starts from random ones."""
    if policy.init == "random":
        return None
    if Path(policy.model_name).is_dir():
        return Path(policy.model_name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(policy.model_name, allow_patterns=["*.safetensors", "*.json"]))
