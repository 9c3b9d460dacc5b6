# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Differences between the run that wrote a checkpoint and a run that resumes from it."""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from nemo_rl_moe.checkpoints.state import json_ready
from nemo_rl_moe.checkpoints.store import CHECKPOINT_NAME, FINAL_WEIGHTS_FOLDER
from nemo_rl_moe.config.algorithm import ORDER_OF_THE_DATA, Algorithm
from nemo_rl_moe.config.files import leaves
from nemo_rl_moe.config.renamed_keys import new_key
from nemo_rl_moe.config.schema import MasterConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.masking import masked

_NOT_REPORTED = (
    "logger.",
    "checkpointing.",
    "cluster.worker_call_timeout_s",
    "cluster.worker_start_timeout_s",
    "cluster.max_restarts",
    "data.load_timeout_s",
    "policy.max_consecutive_skipped_updates",
    "policy.megatron_cfg.distributed_timeout_minutes",
    "policy.megatron_cfg.env_vars",
)
_LAYOUT = (
    "cluster.num_nodes",
    "cluster.gpus_per_node",
    "cluster.cpu_workers_per_node",
    "policy.megatron_cfg.tensor_model_parallel_size",
    "policy.megatron_cfg.pipeline_model_parallel_size",
    "policy.megatron_cfg.virtual_pipeline_model_parallel_size",
    "policy.megatron_cfg.num_layers_in_first_pipeline_stage",
    "policy.megatron_cfg.num_layers_in_last_pipeline_stage",
    "policy.megatron_cfg.context_parallel_size",
    "policy.megatron_cfg.expert_model_parallel_size",
    "policy.megatron_cfg.expert_tensor_parallel_size",
    "policy.megatron_cfg.sequence_parallel",
)
_OPTIMIZER_STATE = "the checkpoint's optimizer state does not fit"
_OTHER_ADAPTERS = "the checkpoint's adapters have other settings"
OTHER_BASE = "the checkpoint's adapters belong to another base"
_WRONG_TO_CHANGE_EVERYWHERE = {
    "data.shuffle": ORDER_OF_THE_DATA,
    "*.lora": _OTHER_ADAPTERS,
    "*.lora.rank": _OTHER_ADAPTERS,
    "*.lora.alpha": _OTHER_ADAPTERS,
    "*.lora.use_rslora": _OTHER_ADAPTERS,
    "*.lora.targets*": _OTHER_ADAPTERS,
    "*.lora.experts": _OTHER_ADAPTERS,
}
_WRONG_TO_CHANGE_WITH_OPTIMIZER = {
    "policy.precision": _OPTIMIZER_STATE,
    "policy.megatron_cfg.freeze_moe_router": _OPTIMIZER_STATE,
    "policy.megatron_cfg.mtp_num_layers": _OPTIMIZER_STATE,
    "policy.freeze.vision_tower": _OPTIMIZER_STATE,
    "policy.freeze.projector": _OPTIMIZER_STATE,
    "policy.freeze.language_model": _OPTIMIZER_STATE,
}
_RENAMED_VALUES = {("dpo.reference_logprobs", "beforehand"): "precompute"}
"""Key and old value in a checkpoint's configuration -> new name of the value."""
_ABSENT = "not set"
_EXPERIMENT = ("policy.model_name", "policy.tokenizer", "data.train", "data.shuffle")


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return key -> old and new value as texts, for each changed key that can change the training.

    Secrets are masked on both sides, and never differ. A key that is null does not count if the other side lacks it.
    """
    renamed = {new_key(key) or key: value for key, value in _as_texts(before).items()}
    old = {key: _RENAMED_VALUES.get((key, value), value) for key, value in renamed.items()}
    if "policy.lora.alpha" in old:  # earlier releases had only this scale
        old.setdefault("policy.lora.use_rslora", _shown(False))
    new = _as_texts(now)
    absent = {key for key in old.keys() ^ new.keys() if {**old, **new}[key] == _shown(None)}
    return {
        key: (old.get(key, _ABSENT), new.get(key, _ABSENT))
        for key in sorted((old.keys() | new.keys()) - absent)
        if old.get(key) != new.get(key) and not key.startswith(_NOT_REPORTED)
    }


def wrong_changes(
    algorithm: Algorithm,
    changes: Mapping[str, tuple[str, str]],
    *,
    with_optimizer: bool,
    with_adapters: bool = False,
    base_is_known: bool = False,
) -> dict[str, tuple[str, str, str]]:
    """Return key -> old value, new value and reason, for each change that prevents resuming.

    Args:
        changes: Result of `changed_keys`.
        with_optimizer: Whether the checkpoint has optimizer state.
        with_adapters: Whether the checkpoint has adapters without their base.
        base_is_known: Whether the checkpoint has the fingerprint of the base, so that the path of the base may change.
    """
    wrong = {**algorithm.resume_keys, **_WRONG_TO_CHANGE_EVERYWHERE}
    if with_optimizer:
        wrong |= _WRONG_TO_CHANGE_WITH_OPTIMIZER
    if with_adapters:
        wrong |= {"policy.init": OTHER_BASE, "policy.init_seed": OTHER_BASE}
        wrong |= {} if base_is_known else {"policy.model_name": OTHER_BASE}
    found = {key: next((why for name, why in wrong.items() if fnmatchcase(key, name)), None) for key in changes}
    return {key: (*changes[key], why) for key, why in found.items() if why is not None}


def other_experiment(algorithm: Algorithm, changes: Mapping[str, tuple[str, str]]) -> tuple[str, str, str] | None:
    """Return the first change that makes a run another experiment: key, old and new value. None if there is none.

    The keys that define an experiment are the model, the tokenizer, the training data, their order, and the loop's
    seed. A key is ignored if the release that wrote the checkpoint did not have the key yet.
    """
    for name in (*_EXPERIMENT, f"{algorithm.loop_name}.seed"):
        for key, (old, new) in changes.items():
            if old != _ABSENT and (key == name or key.startswith(f"{name}.")):
                return key, old, new
    return None


def changes_line(changes: Mapping[str, tuple[str, str]]) -> str | None:
    """Return a warning with all changed keys except parallel sizes. None without changes."""
    reported = [f"{key} {old} -> {new}" for key, (old, new) in changes.items() if key not in _LAYOUT]
    return f"the configuration differs from the checkpoint's: {'; '.join(reported)}" if reported else None


def layout_line(before: Mapping[str, int], now: Mapping[str, int]) -> str | None:
    """Return a warning with the changed parallel dimensions. None without changes."""
    changed = [
        f"{name} {before.get(name, _ABSENT)} -> {now.get(name, _ABSENT)}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    if not changed:
        return None
    return f"the parallel layout has changed, so results may differ by rounding: {'; '.join(changed)}"


def _as_texts(config: Mapping[str, Any]) -> dict[str, str]:
    return {key: _shown(value) for key, value in leaves(masked(json_ready(config))) if value != {}}


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


_AT_RISK = re.compile(rf"{CHECKPOINT_NAME}|{re.escape(FINAL_WEIGHTS_FOLDER)}(_.+)?")


def refuse_model_among_checkpoints(config: MasterConfig, checkpoint_dir: Path) -> None:
    """Refuse a run whose initial model is in its folder of checkpoints, if the run would delete the model there."""
    model = Path(config.policy.model_name)
    # Check the given path and the path without links, as either may be removed.
    for path, folder in (
        (model.absolute(), checkpoint_dir.absolute()),
        (model.resolve(), checkpoint_dir.resolve()),
    ):
        inside = path.relative_to(folder).parts if path.is_relative_to(folder) else ()
        if inside and _AT_RISK.fullmatch(inside[0]) and path.is_dir():
            raise ConfigurationError(
                f"policy.model_name: {config.policy.model_name} is in checkpointing.checkpoint_dir ({checkpoint_dir}), "
                f"where this run removes or replaces {inside[0]} as it saves; set another "
                "checkpointing.checkpoint_dir, or copy the model to another place"
            )
