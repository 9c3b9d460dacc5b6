# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds a model's files: configuration and weights; a local folder or a hub's name."""

from pathlib import Path
from typing import Any

from nemo_rl_moe.checkpoints.store import POLICY_FOLDER_NAME
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.safetensors_folder import SafetensorsFolder

MEGATRON_WEIGHTS_FOLDER = POLICY_FOLDER_NAME
"""Of a folder with weights in Megatron-Core's format, such as a checkpoint of a run: the subfolder that holds them."""


def load_hf_config(model_name: str) -> Any:
    """What transformers makes of the model's `config.json`. Code from the hub is never run.

    Raises:
        ConfigurationError: There is none, it cannot be read, or the family or one of its fields is not supported.
    """
    from transformers import AutoConfig

    from nemo_rl_moe.models.megatron.families import family_of_type

    config_json = load_config_json(model_name)
    family = family_of_type(config_json.get("model_type"))
    try:
        hf_config = AutoConfig.from_pretrained(model_name, trust_remote_code=False)
    except Exception as error:  # transformers checks fields with types of its own
        raise _unreadable(model_name, error) from error
    if problems := family.config_fields.problems(config_json, hf_config, family.name):
        raise ConfigurationError(problems)
    return hf_config


def load_config_json(model_name: str) -> dict[str, Any]:
    """The model's `config.json` as it is: without what transformers adds to it.

    Raises:
        ConfigurationError: There is none, or it cannot be read.
    """
    from transformers import PreTrainedConfig

    try:
        found, _ = PreTrainedConfig.get_config_dict(model_name)
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, OSError) and not Path(model_name).is_dir():
            raise ConfigurationError(
                f"policy.model_name: got {model_name!r}, which is no folder here and cannot be had from the hub "
                "(no network, no such model, or no access); a folder with the model's config.json will do"
            ) from error
        raise _unreadable(model_name, error) from error
    if not found:
        raise ConfigurationError(f"policy.model_name: {model_name} holds no config.json")
    return {name: value for name, value in found.items() if name != "_commit_hash"}


def _unreadable(model_name: str, error: Exception) -> ConfigurationError:
    reason = " ".join(str(error).split())
    return ConfigurationError(f"policy.model_name: cannot read the configuration of {model_name!r}: {reason}")


def weights_folder(policy: PolicyConfig) -> Path | None:
    """The folder that the policy's weights are read from; None where it starts from random ones."""
    if policy.init == "random":
        return None
    if Path(policy.model_name).is_dir():
        return Path(policy.model_name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(policy.model_name, allow_patterns=["*.safetensors", "*.json"]))


def holds_megatron_weights(folder: Path) -> bool:
    """Whether a folder's weights are in Megatron-Core's format: those of a checkpoint, or of `nemo-rl-moe convert`."""
    return (folder / MEGATRON_WEIGHTS_FOLDER).is_dir()


def check_weights(policy: PolicyConfig) -> None:
    """Looks whether the folder that weights are to be read from holds whole files of them; reads no weights.

    Raises:
        ConfigurationError: It holds none, or one that is damaged.
    """
    folder = Path(policy.model_name)
    if policy.init == "pretrained" and folder.is_dir() and not holds_megatron_weights(folder):
        SafetensorsFolder(folder)
