# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What differs between the run that wrote a checkpoint and the run that goes on from it."""

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_rl_moe.checkpoints.state import json_ready

_NOT_TOLD = (
    "logger.",
    "checkpointing.",
    "cluster.worker_start_timeout_s",
    "cluster.max_restarts",
    "data.load_timeout_s",
    "policy.max_consecutive_skipped_updates",
)
_LAYOUT = (
    "cluster.num_nodes",
    "cluster.gpus_per_node",
    "cluster.cpu_workers_per_node",
    "policy.megatron_cfg.tensor_model_parallel_size",
    "policy.megatron_cfg.pipeline_model_parallel_size",
    "policy.megatron_cfg.virtual_pipeline_model_parallel_size",
    "policy.megatron_cfg.context_parallel_size",
    "policy.megatron_cfg.expert_model_parallel_size",
    "policy.megatron_cfg.expert_tensor_parallel_size",
    "policy.megatron_cfg.sequence_parallel",
)
_POSITION_IN_THE_DATA = "the checkpoint counts its place in the data in units of it"
_ORDER_OF_THE_DATA = "the checkpoint's place in the data is one in the order that it gives"
_OPTIMIZER_STATE = "the checkpoint's optimizer state does not fit"
_WRONG_TO_CHANGE = {
    "sft": {"policy.train_global_batch_size": _POSITION_IN_THE_DATA, "sft.seed": _ORDER_OF_THE_DATA},
    "dpo": {"policy.train_global_batch_size": _POSITION_IN_THE_DATA, "dpo.seed": _ORDER_OF_THE_DATA},
    "grpo": {"grpo.num_prompts_per_step": _POSITION_IN_THE_DATA, "grpo.seed": _ORDER_OF_THE_DATA},
}
_WRONG_TO_CHANGE_EVERYWHERE = {"data.shuffle": _ORDER_OF_THE_DATA}
_WRONG_TO_CHANGE_WITH_OPTIMIZER = {
    "policy.precision": _OPTIMIZER_STATE,
    "policy.megatron_cfg.freeze_moe_router": _OPTIMIZER_STATE,
}
_ABSENT = "not set"
_EXPERIMENT = ("policy.model_name", "policy.tokenizer", "data.train", "data.shuffle")


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Keys whose values differ, each with both values as text; what cannot change the training is left out.

    Args:
        before: The checkpoint's resolved configuration.
        now: The present one.
    """
    old, new = dict(_leaves(json_ready(before))), dict(_leaves(json_ready(now)))
    return {
        key: (old.get(key, _ABSENT), new.get(key, _ABSENT))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not key.startswith(_NOT_TOLD)
    }


def wrong_changes(
    algorithm: str, changes: Mapping[str, tuple[str, str]], *, with_optimizer: bool
) -> dict[str, tuple[str, str, str]]:
    """Those of the changes with which the run would go on wrongly: key to the two values and the reason."""
    wrong = _WRONG_TO_CHANGE.get(algorithm, {}) | _WRONG_TO_CHANGE_EVERYWHERE
    if with_optimizer:
        wrong |= _WRONG_TO_CHANGE_WITH_OPTIMIZER
    return {key: (*values, wrong[key]) for key, values in changes.items() if key in wrong}


def other_experiment(algorithm: str, changes: Mapping[str, tuple[str, str]]) -> tuple[str, str, str] | None:
    """The first change that makes a run another experiment and not more of the same: key and both values, or None.

    That is another model, tokenizer, training data, seed of the loop, or order of the data.
    """
    for name in (*_EXPERIMENT, f"{algorithm}.seed"):
        for key, (old, new) in changes.items():
            if key == name or key.startswith(f"{name}."):
                return key, old, new
    return None


def changes_line(changes: Mapping[str, tuple[str, str]]) -> str | None:
    """One line for all changed keys but those of the layout; None where there are none."""
    told = [f"{key} {old} -> {new}" for key, (old, new) in changes.items() if key not in _LAYOUT]
    return f"the configuration differs from the checkpoint's: {'; '.join(told)}" if told else None


def layout_line(before: Mapping[str, int], now: Mapping[str, int]) -> str | None:
    """One line that says how the layout differs; None where it does not."""
    changed = [
        f"{name} {before.get(name, _ABSENT)} -> {now.get(name, _ABSENT)}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    if not changed:
        return None
    return f"continues in another layout, equal within rounding and not to the last bit: {'; '.join(changed)}"


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, _shown(value)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
