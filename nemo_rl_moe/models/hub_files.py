# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A model's files on the Hugging Face hub: exactly those that a run reads, fetched before a worker starts."""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.model_files import CONFIG_FILE, GENERATION_CONFIG_FILE
from nemo_rl_moe.models.safetensors_folder import INDEX_FILE, ONE_FILE, one_line, read_index


@dataclass(frozen=True)
class HubModel:
    """Files of one version of a model.

    Attributes:
        name: The hub's name, such as "Qwen/Qwen3-30B-A3B".
        commit: The version: every machine reads the same one, whatever the hub has got meanwhile.
        files: Names of the files.
    """

    name: str
    commit: str
    files: tuple[str, ...]

    def folder(self, progress: Callable[[float], None] = lambda share: None) -> Path:
        """This machine's folder of the files. What its cache (HF_HOME) lacks is fetched, once for all its processes.

        Args:
            progress: Gets the share of the files that are there.

        Raises:
            ConfigurationError: A file cannot be had.
        """
        found = Path()
        for number, file in enumerate(self.files, start=1):
            found = _fetch(self.name, file, self.commit)
            progress(number / len(self.files))
        return found.parent


def fetch_from_hub(name: str, *, with_weights: bool, progress: Callable[[float], None]) -> tuple[HubModel, Path]:
    """Brings a model onto this machine: its configuration, and the weights that its index names.

    Args:
        name: The hub's name.
        with_weights: Fetch weights too: the files of the index, or `model.safetensors`; other files of the repository,
            which may be the same weights in another form, stay there.
        progress: Gets the share of the files that are there.

    Returns:
        What was fetched, and the folder in which it lies.

    Raises:
        ConfigurationError: There is no such model, it cannot be had, or its index is damaged.
    """
    folder = _fetch(name, CONFIG_FILE, None).parent
    files = [CONFIG_FILE]
    if _fetch_if_there(name, GENERATION_CONFIG_FILE, folder.name):
        files.append(GENERATION_CONFIG_FILE)
    if with_weights:
        has_index = _fetch_if_there(name, INDEX_FILE, folder.name)
        files += [INDEX_FILE, *sorted(set(read_index(folder).values()))] if has_index else [ONE_FILE]
    model = HubModel(name, folder.name, tuple(files))
    return model, model.folder(progress)


def fetching_problem(model: HubModel) -> str | None:
    """Fetches what this machine's cache lacks of a model; why that fails, with the machine's name, or None."""
    try:
        model.folder()
    except ConfigurationError as error:
        return f"{error} (on {socket.gethostname()})"
    return None


def _fetch_if_there(name: str, file: str, commit: str) -> bool:
    from huggingface_hub.errors import EntryNotFoundError

    try:
        _fetch(name, file, commit)
    except ConfigurationError as error:
        # Also where the network is away and the cache lacks it: then the next file that is needed says so.
        if isinstance(error.__cause__, EntryNotFoundError):
            return False
        raise
    return True


def _fetch(name: str, file: str, commit: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, file, revision=commit))
    except Exception as error:  # of the network, the hub, the disk: dozens of types
        raise ConfigurationError(
            f"policy.model_name: got {name!r}, which is no folder here, and {file} of it cannot be had from the hub "
            f"(no network, no such model or file, or no access): {one_line(error)}; a folder with the model's files "
            "will do"
        ) from error
