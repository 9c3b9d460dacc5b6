# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules that translate NeMo-RL's settings of a second model: the critic of PPO, or the teacher of distillation."""

from typing import Any

from nemo_rl_moe.config.nemo_rl_translation import Theirs, Translation, nested

_LAYOUT = {"tensor_model": "tensor", "pipeline_model": None, "expert_model": "expert", "expert_tensor": None}
"""Parallel size of a role -> its name in NeMo-RL's PyTorch backend. None: that backend has no such size."""


def critic(theirs: Theirs, translation: Translation) -> None:
    """Translate the critic, and PPO's advantages."""
    values, section = translation.values, "value"
    for key, value in _model(theirs, translation, section, "critic").items():
        values[f"value.{key}"] = value
    engine = _engine(theirs, section)
    rate = f"{section}.optimizer.kwargs.lr" if engine.endswith("dtensor_cfg") else f"{engine}.optimizer.lr"
    values["value.lr"] = theirs.get(rate, values.get("policy.megatron_cfg.optimizer.lr"))
    warmup = theirs.get(f"{engine}.scheduler.lr_warmup_iters")
    values["value.lr_warmup_iters"] = 0 if warmup is None else warmup
    name = theirs.get("ppo.adv_estimator.name", "gae")
    if name != "gae":
        translation.without.append(f"ppo.adv_estimator.name: {name}: PPO only has gae, which the translation sets")


def teacher(theirs: Theirs, translation: Translation) -> None:
    """Translate the teacher. Also set an estimator that compares no responses, as distillation trains on no reward."""
    values = translation.values
    if not theirs.has("teacher"):
        translation.obstacles.append("distillation.teachers: no section teacher there: name the models to learn from")
    model = _model(theirs, translation, "teacher", "teacher") | {"adapter": None}
    values["distillation.teachers"] = {"teacher": nested(model)}
    values |= {"grpo.adv_estimator.name": "reinforce", "grpo.adv_estimator.normalize_rewards": False}


def _model(theirs: Theirs, translation: Translation, section: str, role: str) -> dict[str, Any]:
    """Return a role's keys with their values, and translate the machines of its workers."""
    engine, values = _engine(theirs, section), translation.values
    found: dict[str, Any] = {
        "model_name": theirs.get(f"{section}.model_name", values.get("policy.model_name")),
        "logprob_batch_size": theirs.first(f"{section}.logprob_batch_size", f"{section}.train_micro_batch_size") or 1,
    }
    for ours, of_torch in _LAYOUT.items():
        name = f"{ours}_parallel_size" if engine.endswith("megatron_cfg") else of_torch and f"{of_torch}_parallel_size"
        found[f"megatron_cfg.{ours}_parallel_size"] = 1 if name is None else theirs.get(f"{engine}.{name}", 1)
    is_shared = found["megatron_cfg.tensor_model_parallel_size"] > 1
    found["megatron_cfg.sequence_parallel"] = is_shared
    values[f"cluster.roles.{role}"] = {
        "num_nodes": theirs.get("cluster.num_nodes", 1),
        "gpus_per_node": theirs.get("cluster.gpus_per_node", 1),
    }
    values["env.score_truncated"] = True
    translation.changed.append(
        f"{section}: a model with GPUs of its own, which cluster.roles.{role} counts apart from the policy's"
    )
    return found


def _engine(theirs: Theirs, section: str) -> str:
    uses_megatron = theirs.get(f"{section}.megatron_cfg.enabled", False)
    theirs.get(f"{section}.dtensor_cfg.enabled")
    return f"{section}.{'megatron_cfg' if uses_megatron else 'dtensor_cfg'}"
