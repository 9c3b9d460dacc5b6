# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules for checkpointing, and for the local files and folders that a configuration names."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from nemo_rl_moe.config.algorithm import AUTO_METRIC, algorithm_of, metric_in_force, roles_of
from nemo_rl_moe.config.role_keys import key_of_role, lines_on_trained_models
from nemo_rl_moe.config.schema import GRPOMasterConfig, MasterConfig, PairMasterConfig, SFTMasterConfig
from nemo_rl_moe.config.schema_base import SupervisedLoopConfig
from nemo_rl_moe.config.schema_grpo import GRPOConfig, PromptDataConfig, PromptSourceConfig
from nemo_rl_moe.config.schema_policy import FrozenRoleConfig, PolicyConfig
from nemo_rl_moe.config.schema_run import (
    DURATION_FORM,
    DataSourceConfig,
    ResponseDataConfig,
    format_duration,
    parse_duration,
)
from nemo_rl_moe.config.suggestions import did_you_mean, nearest

LoopMasterConfig = SFTMasterConfig | PairMasterConfig | GRPOMasterConfig


def loop_section(config: LoopMasterConfig) -> tuple[str, SupervisedLoopConfig | GRPOConfig]:
    """Return the name of the loop's section, and the section."""
    algorithm = algorithm_of(config)
    return algorithm.loop_name, algorithm.loop_of(config)


_SECTION = "checkpointing"


def metric_has_a_source(config: MasterConfig) -> Iterator[str]:
    """Check that the best metric's name is `auto`, `val:NAME` or `train:NAME`."""
    name = config.checkpointing.metric_name
    if name == AUTO_METRIC and not config.checkpointing.higher_is_better:
        yield (
            f"{_SECTION}.higher_is_better: false needs a metric of which less is better, such as {_SECTION}.metric_name"
            f" val:loss; got {AUTO_METRIC}, which is {metric_in_force(config)}"
        )
    if name in (None, AUTO_METRIC) or re.fullmatch(r"(val|train):[^\s:]+", str(name)):
        return
    yield (
        f"{_SECTION}.metric_name: got {name!r}, expected {AUTO_METRIC}, val:NAME or train:NAME, or null"
        f"{did_you_mean(_nearest_metric(str(name)))}"
    )


def chooses_by_validation(config: MasterConfig) -> bool:
    """Return whether a metric of validation selects the checkpoints to keep."""
    settings, metric = config.checkpointing, metric_in_force(config)
    return settings.enabled and settings.keep_top_k is not None and metric is not None and metric.startswith("val:")


def metric_is_measured(config: LoopMasterConfig) -> Iterator[str]:
    """Check that the run measures its best metric."""
    if not chooses_by_validation(config) or config.data.validation is None:
        return  # without validation data the newest checkpoints are kept, as `notices.validation_is_off` reports
    name, loop = loop_section(config)
    if loop.val_period == 0 and not loop.val_at_end:
        yield (
            f"{_SECTION}.metric_name: {metric_in_force(config)} needs a validation, but {name}.val_period is 0 and"
            f" {name}.val_at_end false; switch one on, or set null (keep the newest) or train:NAME"
        )


def checkpoint_dir_is_a_folder_of_its_own(config: MasterConfig) -> Iterator[str]:
    """Refuse the root of the file system as checkpoint folder."""
    name = config.checkpointing.checkpoint_dir
    if name is not None and (folder := Path(name).resolve()).parent == folder:
        yield f"{_SECTION}.checkpoint_dir: got {name}, expected a folder for this run's checkpoints alone"


def time_limit_is_a_duration(config: MasterConfig) -> Iterator[str]:
    """Check that the time limit of a run is a duration above 0."""
    text = config.checkpointing.checkpoint_must_save_by
    if text is None:
        return
    seconds = parse_duration(text)
    subject = f"{_SECTION}.checkpoint_must_save_by"
    if seconds is None:
        yield (
            f'{subject}: got {text!r}, expected {DURATION_FORM} such as "00:03:30:00" (3 hours 30 minutes), or null'
            f"{did_you_mean(_nearest_duration(text))}"
        )
    elif seconds == 0:
        yield f'{subject}: got {text!r}, expected a time above 0 such as "00:03:30:00", or null'


def checkpoints_are_on_where_they_are_needed(config: MasterConfig) -> Iterator[str]:
    """Check that checkpoints are on if a time limit or restarts need them."""
    if config.checkpointing.enabled:
        return
    if config.checkpointing.checkpoint_must_save_by is not None:
        yield f"{_SECTION}.checkpoint_must_save_by: needs {_SECTION}.enabled true; set null for no time limit"
    if config.cluster.max_restarts > 0:
        yield (
            f"cluster.max_restarts: {config.cluster.max_restarts} needs {_SECTION}.enabled true: a restart goes on from"
            " a checkpoint; set 0 for no restarts"
        )


def _nearest_metric(name: str) -> str | None:
    """Return a suggestion for a misspelt metric, or None. For `val/accuracy`, it is `val:accuracy`."""
    match = re.match(r"\s*(val\w*|train\w*)\s*[:/.]+\s*(\S+)", name)
    if match is None:
        return nearest(name, [AUTO_METRIC])
    return f"{'val' if match[1].startswith('val') else 'train'}:{match[2].replace(':', '/')}"


def _nearest_duration(text: str) -> str | None:
    """Return a suggestion, such as `00:03:30:00` for `3:30:00` or `01:03:00:00` for `00:27:00:00`, or None."""
    parts = text.strip().split(":")
    if not all(part.isascii() and part.isdigit() for part in parts) or not 2 <= len(parts) <= 4:
        return None
    days, hours, minutes, seconds = [0] * (4 - len(parts)) + [int(part[-9:]) for part in parts]
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    normal = format_duration(total)
    return f'"{normal}"' if parse_duration(normal) else None


CHECKPOINTING_RULES = (
    metric_has_a_source,
    metric_is_measured,
    checkpoint_dir_is_a_folder_of_its_own,
    time_limit_is_a_duration,
    checkpoints_are_on_where_they_are_needed,
)


def looks_like_a_path(name: str) -> bool:
    """Return whether a name means a folder. A name on the hub has no leading dot or slash, and at most one slash.

    A name below an existing folder counts as a folder too, because asking the hub for a mistyped folder takes half a
    minute.
    """
    is_inside = "/" in name and Path(name).parent.is_dir()
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).is_dir() or is_inside


def model_folder_exists(config: MasterConfig) -> Iterator[str]:
    """Check that a local model is a folder with a `config.json`."""
    yield from _folder_problem("policy.model_name", config.policy.model_name, needs="config.json")


def role_model_folders_exist(config: MasterConfig) -> Iterator[str]:
    """Check that the local models of other roles are folders with a `config.json`."""
    for role, model in roles_of(config).items():
        yield from _folder_problem(f"{key_of_role(config, role)}.model_name", model.model_name, needs="config.json")


def tokenizer_folder_exists(config: MasterConfig) -> Iterator[str]:
    """Check that a local tokenizer is a folder."""
    if config.policy.tokenizer.name != getattr(config.policy, "model_name", None):
        yield from _folder_problem("policy.tokenizer.name", config.policy.tokenizer.name)


def chat_template_exists(config: MasterConfig) -> Iterator[str]:
    """Check that the user's chat template is a file."""
    template = config.policy.tokenizer.chat_template
    if template is not None and not Path(template).is_file():
        yield f"policy.tokenizer.chat_template: {_not_found(Path(template))}"


def adapter_folder_exists(config: MasterConfig) -> Iterator[str]:
    """Check that initial adapters and the adapters of frozen roles are folders."""

    def line_on(model: PolicyConfig) -> Iterator[str]:
        yield from _adapter_problem("policy.lora.path", None if model.lora is None else model.lora.path)

    yield from lines_on_trained_models(config, line_on)
    for role, frozen in roles_of(config).items():
        if isinstance(frozen, FrozenRoleConfig):
            yield from _adapter_problem(f"{key_of_role(config, role)}.adapter", frozen.adapter)


def _adapter_problem(key: str, path: str | None) -> Iterator[str]:
    if path is not None and not Path(path).is_dir():
        yield f"{key}: {_not_found(Path(path))}; expected a folder in peft's form, `final` or a checkpoint"


def training_data_exists(config: LoopMasterConfig) -> Iterator[str]:
    """Check that a `.jsonl` file of training data exists."""
    for key, data in _sections_of(config):
        yield from _data_problem(f"{key}.train.path", data.train)


def validation_data_exists(config: LoopMasterConfig) -> Iterator[str]:
    """Check that a `.jsonl` file of validation data exists."""
    for key, data in _sections_of(config):
        if data.validation is not None:
            yield from _data_problem(f"{key}.validation.path", data.validation)


def checkpoint_dir_can_be_made(config: MasterConfig) -> Iterator[str]:
    """Check that the checkpoint folder, or the nearest existing one above it, may be written to."""
    if config.checkpointing.enabled and config.checkpointing.checkpoint_dir is not None:
        yield from _making_problem("checkpointing.checkpoint_dir", config.checkpointing.checkpoint_dir)


def log_dir_can_be_made(config: MasterConfig) -> Iterator[str]:
    """Check that the log folder, or the nearest existing one above it, may be written to."""
    yield from _making_problem("logger.log_dir", config.logger.log_dir)


def _making_problem(key: str, name: str) -> Iterator[str]:
    folder = Path(name).absolute()
    # For a folder that may not be read, os.path returns False and pathlib raises.
    there = next(place for place in (folder, *folder.parents) if os.path.exists(place))  # noqa: PTH110
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "may not be written to" if there.is_dir() else "is no folder"
        yield f"{key}: got {name}, and {there} {why}; expected a folder that you may write to"


def _folder_problem(key: str, name: str, needs: str | None = None) -> Iterator[str]:
    if not looks_like_a_path(name):
        return
    folder = Path(name)
    if not folder.is_dir():
        yield f"{key}: {_not_found(folder)}; expected a folder, or a name on the hub such as Qwen/Qwen3-30B-A3B"
    elif needs is not None and not (folder / needs).is_file():
        yield f"{key}: the folder {name} holds no {needs}{did_you_mean(_model_in(folder, needs))}"


def _model_in(checkpoint_dir: Path, needs: str) -> str | None:
    """Return the final model in a folder of checkpoints, or else its newest checkpoint, or None."""
    steps = [path for path in checkpoint_dir.glob("step_*") if path.name.removeprefix("step_").isdecimal()]
    newest_first = sorted(steps, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)
    return next((str(path) for path in [checkpoint_dir / "final", *newest_first] if (path / needs).is_file()), None)


def _sections_of(config: LoopMasterConfig) -> list[tuple[str, ResponseDataConfig | PromptDataConfig]]:
    if isinstance(config, GRPOMasterConfig):
        return list(config.data.sources())
    return [("data", config.data)]


def _data_problem(key: str, source: DataSourceConfig | PromptSourceConfig) -> Iterator[str]:
    if source.path is not None and source.path.endswith((".jsonl", ".txt")) and not Path(source.path).is_file():
        yield f"{key}: {_not_found(Path(source.path))}"


def _not_found(path: Path) -> str:
    """Return the error text for a path that is not a file or does not exist, with the most similar name in its
    folder."""
    if path.exists():
        return f"{path} is no plain file"
    neighbours = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    neighbour = nearest(path.name, neighbours)
    start = "" if path.is_absolute() else f" in the working folder {Path.cwd()}"
    return f"{path} not found{start}{did_you_mean(str(path.parent / neighbour) if neighbour else None)}"


PATH_RULES = (
    model_folder_exists,
    role_model_folders_exist,
    tokenizer_folder_exists,
    chat_template_exists,
    adapter_folder_exists,
    training_data_exists,
    validation_data_exists,
    checkpoint_dir_can_be_made,
    log_dir_can_be_made,
)
