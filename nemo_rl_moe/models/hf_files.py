# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A model's configuration and weights: a local folder, or files of the hub, which are fetched before workers start."""

import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nemo_rl_moe.checksums import ACCEPTING, INVENTORY_FILE_NAME, InventoryError, check_sizes
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.hub import from_cache_alone, hub_silence
from nemo_rl_moe.models.model_files import CONFIG_FILE, GENERATION_CONFIG_FILE, IMAGE_FILES
from nemo_rl_moe.models.safetensors_folder import (
    INDEX_FILE,
    ONE_FILE,
    NoWeightsError,
    SafetensorsFolder,
    one_line,
    read_index,
)

RANDOM_HINT = "policy.init: random starts without weights"
"""Hint for a model without weights."""


@dataclass(frozen=True)
class HubModel:
    """Files of one version of a model.

    Attributes:
        commit: Commit of the version, so that every machine reads the same files.
    """

    name: str
    commit: str
    files: tuple[str, ...]

    def folder(self, progress: Callable[[float], None] = lambda share: None) -> Path:
        """Return the folder of the files on this machine, after fetching files that its cache (HF_HOME) lacks."""
        found = Path()
        for number, file in enumerate(self.files, start=1):
            found = _fetch(self.name, file, self.commit)
            progress(number / len(self.files))
        return found.parent


def fetch_from_hub(name: str, *, with_weights: bool, progress: Callable[[float], None]) -> HubModel:
    """Fetch a model's small files to this machine, and its weights if `with_weights` is true. Return the model.

    The weights are the files that the index names, or `model.safetensors` without an index. Other files of the
    repository may be the same weights in another format.
    """
    folder = _fetch(name, CONFIG_FILE, None).parent
    files = [CONFIG_FILE]
    optional = [GENERATION_CONFIG_FILE, *(IMAGE_FILES if "vision_config" in _config_json_of_folder(folder) else ())]
    files += [file for file in optional if _fetch_if_there(name, file, folder.name)]
    if with_weights:
        has_index = _fetch_if_there(name, INDEX_FILE, folder.name)
        files += [INDEX_FILE, *sorted(set(read_index(folder).values()))] if has_index else [ONE_FILE]
    model = HubModel(name, folder.name, tuple(files))
    model.folder(progress)
    return model


def fetching_problem(model: HubModel) -> str | None:
    """Fetch a model's missing files. Return the error with this machine's name, or None."""
    try:
        model.folder()
    except ConfigurationError as error:
        return f"{error} (on {socket.gethostname()})"
    return None


def _fetch_if_there(name: str, file: str, commit: str | None) -> Path | None:
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return _fetch(name, file, commit)
    except ConfigurationError as error:
        # Without network, a file that the cache lacks counts as absent too: the next required file raises an error.
        if isinstance(error.__cause__, EntryNotFoundError):
            return None
        raise


def _fetch(name: str, file: str, commit: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, file, revision=commit, local_files_only=from_cache_alone()))
    except Exception as error:  # network, hub and disk raise dozens of types
        raise _not_had(name, file, one_line(error)) from error


def _not_had(name: str, file: str, reason: str) -> ConfigurationError:
    silence = hub_silence()
    why = f"(no such model or file, no access, or no network): {reason}"
    if silence is not None:
        why = f"({silence}), nor from its cache on this machine"
    return ConfigurationError(
        f"policy.model_name: got {name!r}, which is no folder here, and {file} of it cannot be had from the hub {why};"
        " a folder with the model's files will do"
    )


MEGATRON_WEIGHTS_FOLDER = "policy"
"""Subfolder of the weights in a folder in Megatron-Core's format, such as a checkpoint of a run."""


@dataclass(frozen=True)
class ModelSource:
    """Source of a run's model for all machines: a folder that all machines can reach, or else the hub."""

    local: Path | None
    hub: HubModel | None

    def folder(self) -> Path:
        if self.local is not None:
            return self.local
        assert self.hub is not None
        return self.hub.folder()


def find_model(policy: PolicyConfig, progress: Callable[[float], None] = lambda share: None) -> ModelSource:
    """Return the source of the policy's model. If the model is not a folder, fetch it from the hub."""
    folder = Path(policy.model_name)
    if folder.is_dir():
        return ModelSource(folder, None)
    with_weights = policy.init == "pretrained"
    return ModelSource(None, fetch_from_hub(policy.model_name, with_weights=with_weights, progress=progress))


def load_hf_config(model_name: str) -> Any:
    """Return a model's configuration, read with transformers and checked, without running code from the hub.

    The configuration of a vision-language model is flattened: it has the fields of the decoder and of the full model.
    """
    from nemo_rl_moe.models.families import decoder_type_of, family_of_type, vision_family_of
    from nemo_rl_moe.models.families.vision import field_problems
    from nemo_rl_moe.models.image_rules import load_image_rule

    config_json = load_config_json(model_name)
    vision = vision_family_of(config_json)
    if vision is None:
        family = family_of_type(config_json.get("model_type"))
        hf_config = _as_transformers_reads_it(model_name, config_json, family.transformers_type)
        problems = family.config_fields.problems(config_json, hf_config, family.name)
    else:
        decoder_type = decoder_type_of(config_json)
        decoder = vision.decoder or family_of_type(decoder_type, "text_config.")
        hf_config = _as_transformers_reads_it(model_name, config_json, None)
        problems = field_problems(vision, decoder, config_json, hf_config)
    if problems:
        raise ConfigurationError(problems)
    if vision is None:
        return hf_config
    flat = vision.flattened(hf_config, decoder_type)
    rule = load_image_rule(model_name, flat)
    assert rule is not None  # the model has a tower
    flat.pixel_rule = rule.pixels
    return flat


def _as_transformers_reads_it(model_name: str, config_json: Mapping[str, Any], known_type: str | None) -> Any:
    """Return a model's configuration, read with transformers' class for `known_type`, or else for its own type."""
    from transformers import CONFIG_MAPPING, AutoConfig

    try:
        if known_type is not None:
            return CONFIG_MAPPING[known_type].from_dict(dict(config_json))
        is_folder = Path(model_name).is_dir()
        return AutoConfig.from_pretrained(
            model_name, trust_remote_code=False, local_files_only=is_folder or from_cache_alone()
        )
    except Exception as error:  # transformers raises various types
        raise _unreadable(model_name, error) from error


def plain_config(hf_config: Any) -> SimpleNamespace:
    """Return the fields of a model's configuration, under all their names, in an object that needs no transformers.

    This saves a worker three seconds of imports.
    """
    kind = type(hf_config)
    defaults = {name for name in dir(kind) if not isinstance(getattr(kind, name), property)}
    names = vars(hf_config).keys() | defaults | hf_config.attribute_map.keys()
    values = {name: getattr(hf_config, name, None) for name in names if not name.startswith("_")}
    return SimpleNamespace(
        **{
            name: plain_config(value) if hasattr(value, "attribute_map") else value
            for name, value in values.items()
            if not callable(value)
        }
    )


def load_config_json(model_name: str) -> dict[str, Any]:
    """Return a model's `config.json` without transformers' additions."""
    if Path(model_name).is_dir():
        return _config_json_of_folder(Path(model_name))
    # A worker's model is always a folder, so workers need not import transformers.
    from transformers import PreTrainedConfig

    try:
        found, _ = PreTrainedConfig.get_config_dict(model_name, local_files_only=from_cache_alone())
        return {name: value for name, value in found.items() if name != "_commit_hash"}
    except OSError as error:
        raise _not_had(model_name, CONFIG_FILE, one_line(error)) from error
    except Exception as error:  # transformers expects a well-formed file
        raise _unreadable(model_name, error) from error


def load_model_json(model_name: str, file: str) -> Any:
    """Return the content of a small JSON file of the model, or None if the model has no file of this name."""
    folder = Path(model_name)
    path = folder / file if folder.is_dir() else _fetch_if_there(model_name, file, None)
    if path is None or not path.is_file():
        return None
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"policy.model_name: {path} cannot be read: {one_line(error)}") from error


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


def check_small_files(folder: Path, key: str = "policy.model_name") -> None:
    """Compare a model's small files with their checksums, and check the sizes of all its files.

    A folder without `files.json`, such as a folder of the hub's cache, passes. `key` is the setting that names the
    folder.
    """
    if (folder / INVENTORY_FILE_NAME).is_file():
        try:
            check_sizes(folder)
        except InventoryError as error:
            raise ConfigurationError(f"{key}: {error}; {ACCEPTING.format(folder=folder)}") from None


def weights_folder(policy: PolicyConfig, folder: Path) -> Path | None:
    """Return the folder of the policy's initial weights, or None if the weights are random."""
    return None if policy.init == "random" else folder


def holds_megatron_weights(folder: Path) -> bool:
    """Return whether a folder has weights in Megatron-Core's format, from a checkpoint or `nemo-rl-moe convert`."""
    return (folder / MEGATRON_WEIGHTS_FOLDER).is_dir()


def check_weights(policy: PolicyConfig, folder: Path) -> None:
    """Check, without reading weights, that the initial weights are complete and that no small file is damaged."""
    check_small_files(folder)
    if policy.init == "random" or holds_megatron_weights(folder):
        return
    try:
        SafetensorsFolder(folder)
    except NoWeightsError as error:
        raise ConfigurationError([f"{problem}; {RANDOM_HINT}" for problem in error.problems]) from error
