# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules of the `checkpointing` section; see `checks.py`."""

import re
from collections.abc import Iterator

from nemo_rl_moe.config.checks_loop import LoopMasterConfig, loop_section
from nemo_rl_moe.config.duration import DURATION_FORM, format_duration, parse_duration
from nemo_rl_moe.config.schema import MasterConfig
from nemo_rl_moe.config.suggestions import did_you_mean

_SECTION = "checkpointing"


def metric_has_a_source(config: MasterConfig) -> Iterator[str]:
    """The metric is one of training or of validation."""
    name = config.checkpointing.metric_name
    if name is None or re.fullmatch(r"(val|train):[^\s:]+", name):
        return
    yield (
        f"{_SECTION}.metric_name: got {name!r}, expected val:NAME or train:NAME, or null"
        f"{did_you_mean(_nearest_metric(name))}"
    )


def metric_is_measured(config: LoopMasterConfig) -> Iterator[str]:
    """What chooses the best checkpoints is measured by the run."""
    settings = config.checkpointing
    if not settings.enabled or settings.keep_top_k is None or settings.metric_name is None:
        return  # nothing is chosen
    if not settings.metric_name.startswith("val:"):
        return
    subject, ways_out = f"{_SECTION}.metric_name: {settings.metric_name}", "null (keep the newest) or train:NAME"
    if config.data.validation is None:
        yield f"{subject} needs data.validation, which is null; name the data, or set {ways_out}"
        return
    name, loop = loop_section(config)
    if loop.val_period == 0 and not loop.val_at_end:
        yield (
            f"{subject} needs a validation, but {name}.val_period is 0 and {name}.val_at_end false;"
            f" switch one on, or set {ways_out}"
        )


def time_limit_is_a_duration(config: MasterConfig) -> Iterator[str]:
    """The time after which a run saves can be read, and leaves it some time."""
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
    """What goes on from a checkpoint needs one."""
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
    """`val/accuracy`, as the metrics file has it, means `val:accuracy`."""
    match = re.match(r"\s*(val\w*|train\w*)\s*[:/.]+\s*(\S+)", name)
    if match is None:
        return None
    return f"{'val' if match[1].startswith('val') else 'train'}:{match[2].replace(':', '/')}"


def _nearest_duration(text: str) -> str | None:
    """`3:30:00` lacks the days; `00:27:00:00` has more hours than a day."""
    parts = text.strip().split(":")
    if not all(part.isascii() and part.isdigit() for part in parts) or not 2 <= len(parts) <= 4:
        return None
    days, hours, minutes, seconds = [0] * (4 - len(parts)) + [int(part[-9:]) for part in parts]
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    nearest = format_duration(total)
    return f'"{nearest}"' if parse_duration(nearest) else None


CHECKPOINTING_RULES = (
    metric_has_a_source,
    metric_is_measured,
    time_limit_is_a_duration,
    checkpoints_are_on_where_they_are_needed,
)
