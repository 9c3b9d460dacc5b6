# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds a model's files: configuration and weights; a local folder or a hub's name."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_moe.checkpoints.store import POLICY_FOLDER_NAME
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.hub_files import HubModel, fetch_from_hub
from nemo_rl_moe.models.model_files import CONFIG_FILE
from nemo_rl_moe.models.safetensors_folder import NoWeightsError, SafetensorsFolder, one_line

MEGATRON_WEIGHTS_FOLDER = POLICY_FOLDER_NAME
"""Of a folder with weights in Megatron-Core's format, such as a checkpoint of a run: the subfolder that holds them."""


@dataclass(frozen=True)
class ModelSource:
    """Where a run's model is read from, the same for all machines.

    Attributes:
        local: A folder that all of them reach; None: the hub.
        hub: The hub's model; None: a folder.
    """

    local: Path | None
    hub: HubModel | None

    def folder(self) -> Path:
        """The folder on this machine, which fetches what it lacks.

        Raises:
            ConfigurationError: It cannot be had from the hub.
        """
        if self.local is not None:
            return self.local
        assert self.hub is not None
        return self.hub.folder()


def find_model(policy: PolicyConfig, progress: Callable[[float], None] = lambda share: None) -> ModelSource:
    """Finds the policy's model, and fetches it from the hub where it is no folder.

    Args:
        policy: The `policy` section of the configuration.
        progress: Gets the share of the hub's files that are there.

    Raises:
        ConfigurationError: It cannot be had.
    """
    folder = Path(policy.model_name)
    if folder.is_dir():
        return ModelSource(folder, None)
    with_weights = policy.init == "pretrained"
    model, _ = fetch_from_hub(policy.model_name, with_weights=with_weights, progress=progress)
    return ModelSource(None, model)


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

    if Path(model_name).is_dir():
        return _config_json_of_folder(Path(model_name))
    try:
        found, _ = PreTrainedConfig.get_config_dict(model_name)
        return {name: value for name, value in found.items() if name != "_commit_hash"}
    except OSError as error:
        raise ConfigurationError(
            f"policy.model_name: got {model_name!r}, which is no folder here and cannot be had from the hub "
            "(no network, no such model, or no access); a folder with the model's config.json will do"
        ) from error
    except Exception as error:  # transformers expects a well-formed file
        raise _unreadable(model_name, error) from error


def _config_json_of_folder(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    if not path.is_file():
        hint = ""
        if holds_megatron_weights(folder):
            hint = ", only weights: copy the model's config.json and tokenizer into it"
        raise ConfigurationError(f"policy.model_name: the folder {folder} holds no {CONFIG_FILE}{hint}")
    try:
        found: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(str(folder), error) from error
    if not isinstance(found, dict):
        raise ConfigurationError(
            f"policy.model_name: {path}: got {json.dumps(found)[:100]}, expected an object with the model's fields"
        )
    return found


def _unreadable(model_name: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(f"policy.model_name: cannot read the configuration of {model_name!r}: {one_line(error)}")


def weights_folder(policy: PolicyConfig, folder: Path) -> Path | None:
    """Where the policy's weights are read from; None where it starts from random ones.

    Args:
        policy: The `policy` section of the configuration.
        folder: The model's folder on this machine.
    """
    return None if policy.init == "random" else folder


def holds_megatron_weights(folder: Path) -> bool:
    """Whether a folder's weights are in Megatron-Core's format: those of a checkpoint, or of `nemo-rl-moe convert`."""
    return (folder / MEGATRON_WEIGHTS_FOLDER).is_dir()


def check_weights(policy: PolicyConfig, folder: Path) -> None:
    """Looks whether the folder that weights are to be read from holds whole files of them; reads no weights.

    Args:
        policy: The `policy` section of the configuration.
        folder: The model's folder on this machine.

    Raises:
        ConfigurationError: It holds none, or one that is damaged.
    """
    if policy.init == "random" or holds_megatron_weights(folder):
        return
    try:
        SafetensorsFolder(folder)
    except NoWeightsError as error:
        hint = "policy.init: random starts without one"
        raise ConfigurationError([f"{problem}; {hint}" for problem in error.problems]) from error
