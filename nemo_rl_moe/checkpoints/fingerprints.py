# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of data and models, by which a resumed run notices that they have changed."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from nemo_rl_moe.checkpoints.store import POLICY_FOLDER_NAME
from nemo_rl_moe.config.algorithm import algorithm_of, roles_of
from nemo_rl_moe.config.role_keys import key_of_role
from nemo_rl_moe.config.schema import MasterConfig
from nemo_rl_moe.config.schema_policy import FrozenRoleConfig, PolicyConfig, RoleModelConfig, TrainedRoleConfig
from nemo_rl_moe.config.schema_run import POLICY_ROLE

TRAINING_DATA = "training data"
MODEL = "model"
_WEIGHT_FILES = " weight files, "
_DIGITS = 16
_END_BYTES = 1 << 20
_OF_TRAINING_DATA = "samples may be trained on twice or never, and the run differs from one that never stopped"
_OF_A_MODEL = "it is read anew, so that its log-probabilities or scores differ from those before"


def samples_fingerprint(name: str, samples: Iterable[ArrayLike]) -> str:
    """Return the fingerprint of a data set: its name, size and a hash of all tokens in order.

    Args:
        samples: Tokens of each sample, or of both sequences of a pair.
    """
    digest, count = hashlib.sha256(), 0
    for tokens in samples:
        count += 1
        ids = np.asarray(tokens, dtype=np.int64)
        digest.update(ids.size.to_bytes(8, "little"))  # so that other boundaries between samples change the hash
        digest.update(ids.tobytes())
    return f"{name}: {count} samples, {digest.hexdigest()[:_DIGITS]}"


def model_fingerprint(model_name: str) -> str:
    """Return the fingerprint of a model: `config.json`, and sizes, beginnings and ends of the weight files.

    It does not depend on times of files, so that a copy is the same model.

    Args:
        model_name: A folder, or a name on a hub. A name on a hub is returned unchanged.
    """
    folder = Path(model_name)
    if not folder.is_dir():
        return model_name
    digest = hashlib.sha256()
    config = folder / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    files = sorted([*folder.glob("*.safetensors"), *folder.glob(f"{POLICY_FOLDER_NAME}/*.distcp")])
    for file in files:
        size = file.stat().st_size
        digest.update(f"\n{file.name} {size}\n".encode())
        with file.open("rb") as content:
            digest.update(content.read(_END_BYTES))
            content.seek(max(0, size - _END_BYTES))
            digest.update(content.read(_END_BYTES))
    return f"{model_name}: {len(files)}{_WEIGHT_FILES}{digest.hexdigest()[:_DIGITS]}"


def model_fingerprints(config: MasterConfig) -> dict[str, str]:
    """Return description -> fingerprint of each model that a resumed run reads again. Messages use the description.

    Such models are teachers, a reward model, bases of adapters, and the policy's initial model if it is the reference.
    """
    found, keeps_reference = {}, algorithm_of(config).needs_reference(config)
    for role, model in _models(config).items():
        is_frozen = not isinstance(model, PolicyConfig | TrainedRoleConfig)
        if is_frozen or _has_adapters(model) or (role == POLICY_ROLE and keeps_reference):
            found[_description(role)] = model_fingerprint(model.model_name)
        if isinstance(model, FrozenRoleConfig) and model.adapter is not None:
            found[f"{MODEL}'s adapter of the role {role}"] = model_fingerprint(model.adapter)
    return found


def _models(config: MasterConfig) -> dict[str, PolicyConfig | RoleModelConfig]:
    return {POLICY_ROLE: config.policy, **roles_of(config)}


def _has_adapters(model: PolicyConfig | RoleModelConfig) -> bool:
    return isinstance(model, PolicyConfig | TrainedRoleConfig) and model.lora is not None


def _description(role: str) -> str:
    return MODEL if role == POLICY_ROLE else f"{MODEL} of the role {role}"


def other_base(config: MasterConfig, before: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Return the key, old and new fingerprint of a base of adapters that differs. None if all are equal or unknown.

    Args:
        before: The checkpoint's fingerprints.
    """
    for role, model in _models(config).items():
        name = _description(role)
        if _has_adapters(model) and name in before and _content(before[name]) != _content(now[name]):
            section = POLICY_ROLE if role == POLICY_ROLE else key_of_role(config, role)
            return f"{section}.model_name", before[name], now[name]
    return None


def changed_inputs(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a warning, with its consequence, for each input that differs from the checkpoint's."""
    return [
        f"the {name} has changed since the checkpoint ({before[name]} -> {now[name]}):"
        f" {_OF_A_MODEL if name.startswith(MODEL) else _OF_TRAINING_DATA}"
        for name in sorted(before.keys() & now.keys())
        if _content(before[name]) != _content(now[name])
    ]


def _content(fingerprint: str) -> str:
    """Return a fingerprint without the path of the model, as a copy is the same model."""
    return fingerprint.rpartition(": ")[2] if _WEIGHT_FILES in fingerprint else fingerprint
