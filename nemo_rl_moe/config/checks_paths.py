# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules of the local files and folders that a configuration names; they look and never write."""

import os
from collections.abc import Iterator
from pathlib import Path

from nemo_rl_moe.config.checks import Rule, apply_rules
from nemo_rl_moe.config.schema import DPOMasterConfig, GRPOMasterConfig, MasterConfig, SFTMasterConfig
from nemo_rl_moe.config.schema_grpo import PromptSourceConfig
from nemo_rl_moe.config.schema_run import DataSourceConfig
from nemo_rl_moe.config.suggestions import did_you_mean, nearest


def path_problems(config: MasterConfig, *, is_whole: bool) -> list[str]:
    """One line for each local file or folder that is not there.

    Args:
        config: The configuration, or the valid part of it.
        is_whole: False when values are missing from it; rules that need them are skipped.
    """
    return apply_rules(PATH_RULES, config, is_whole=is_whole)


def looks_like_a_path(name: str) -> bool:
    """Tells a folder from a name on the hub, which has no leading dot or slash and at most one slash.

    A name below a folder that exists means a folder too: asking the hub for a mistyped one takes half a minute.
    """
    is_inside = "/" in name and Path(name).parent.is_dir()
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).is_dir() or is_inside


def model_folder_exists(config: MasterConfig) -> Iterator[str]:
    """Local model: a folder with a `config.json`."""
    yield from _folder_problem("policy.model_name", config.policy.model_name, needs="config.json")


def tokenizer_folder_exists(config: MasterConfig) -> Iterator[str]:
    """Local tokenizer: a folder."""
    if config.policy.tokenizer.name != getattr(config.policy, "model_name", None):
        yield from _folder_problem("policy.tokenizer.name", config.policy.tokenizer.name)


def chat_template_exists(config: MasterConfig) -> Iterator[str]:
    """Chat template of the user's own: a file."""
    template = config.policy.tokenizer.chat_template
    if template is not None and not Path(template).is_file():
        yield f"policy.tokenizer.chat_template: {_not_found(Path(template))}"


def training_data_exists(config: SFTMasterConfig | DPOMasterConfig | GRPOMasterConfig) -> Iterator[str]:
    """Training data: a `.jsonl` file that exists."""
    yield from _data_problem("data.train.path", config.data.train)


def validation_data_exists(config: SFTMasterConfig | DPOMasterConfig | GRPOMasterConfig) -> Iterator[str]:
    """Validation data: a `.jsonl` file that exists."""
    if config.data.validation is not None:
        yield from _data_problem("data.validation.path", config.data.validation)


def checkpoint_dir_can_be_made(config: MasterConfig) -> Iterator[str]:
    """Checkpoint folder, or the nearest existing one above it, that may be written to."""
    name = config.checkpointing.checkpoint_dir
    if name is None or not config.checkpointing.enabled:
        return
    there = next(folder for folder in (Path(name).absolute(), *Path(name).absolute().parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "may not be written to" if there.is_dir() else "is no folder"
        yield f"checkpointing.checkpoint_dir: got {name}, and {there} {why}; expected a folder that you may write to"


def _folder_problem(key: str, name: str, needs: str | None = None) -> Iterator[str]:
    if not looks_like_a_path(name):
        return
    folder = Path(name)
    if not folder.is_dir():
        yield f"{key}: {_not_found(folder)}; expected a folder, or a hub's name such as Qwen/Qwen3-30B-A3B"
    elif needs is not None and not (folder / needs).is_file():
        yield f"{key}: the folder {name} holds no {needs}"


def _data_problem(key: str, source: DataSourceConfig | PromptSourceConfig) -> Iterator[str]:
    if source.path is not None and source.path.endswith(".jsonl") and not Path(source.path).is_file():
        yield f"{key}: {_not_found(Path(source.path))}"


def _not_found(path: Path) -> str:
    """Error text for a path that does not exist, with the nearest neighbour, or that is no file."""
    if path.exists():
        return f"{path} is no plain file"
    neighbours = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    neighbour = nearest(path.name, neighbours)
    start = "" if path.is_absolute() else f" in the working folder {Path.cwd()}"
    return f"{path} not found{start}{did_you_mean(str(path.parent / neighbour) if neighbour else None)}"


PATH_RULES: tuple[Rule, ...] = (
    model_folder_exists,
    tokenizer_folder_exists,
    chat_template_exists,
    training_data_exists,
    validation_data_exists,
    checkpoint_dir_can_be_made,
)
