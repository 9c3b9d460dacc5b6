# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Names of settings in errors about a model other than the policy, as the user writes them.

Rules and loaders see such a model as a `policy` section, and use the names of that section.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

from pydantic import BaseModel

from nemo_rl_moe.config.algorithm import roles_of
from nemo_rl_moe.config.schema import MasterConfig
from nemo_rl_moe.config.schema_policy import RoleModelConfig, RoleParallelConfig

_POLICY_KEY = re.compile(r"\bpolicy\.([a-z_]+(?:\.[a-z_]+)*)")
_OTHER_NAMES = {
    "train_micro_batch_size": "logprob_batch_size",
    "megatron_cfg.optimizer.lr": "lr",
    "megatron_cfg.scheduler.lr_warmup_iters": "lr_warmup_iters",
}
"""Settings of a policy that have another name in a role, if the role has them."""
_UNEVEN_STAGES = re.compile(r"; expected, for one, num_layers_in_first_pipeline_stage=.*")
"""Advice that only applies to a policy."""


def key_of_role(config: MasterConfig, role: str) -> str:
    """Return the key of a role's section, such as `value`, or `role NAME` if no section holds its model."""
    return next(_keys_of(config, roles_of(config)[role]), f"role {role}")


def role_problems(config: MasterConfig, role: str, problems: Iterable[str]) -> list[str]:
    """Return problems of a role's model as a `policy` section, with the keys of the role instead of the policy's."""
    key = key_of_role(config, role)
    own = _own_names(roles_of(config)[role])

    def renamed(match: re.Match[str]) -> str:
        name = own.get(match[1])
        return match[0] if name is None else f"{key}.{name}"

    lines = []
    for problem in problems:
        line = _POLICY_KEY.sub(renamed, _UNEVEN_STAGES.sub("; expected a divisor of them", problem))
        if line.startswith("cluster: "):
            line = f"cluster.roles.{role}: {line.removeprefix('cluster: ')}"
        names_it = line.startswith((key, f"cluster.roles.{role}"))
        lines.append(line if names_it else f"role {role}: {line}")
    return lines


def _own_names(model: RoleModelConfig) -> dict[str, str]:
    """Return the settings of a policy that the role has too, with their names there."""
    fields = type(model).model_fields
    same = [*fields, *(f"megatron_cfg.{name}" for name in RoleParallelConfig.model_fields)]
    return {name: name for name in same} | {ours: own for ours, own in _OTHER_NAMES.items() if own in fields}


def _keys_of(section: BaseModel | Mapping[str, object], model: RoleModelConfig) -> Iterator[str]:
    """Yield the keys at which a section holds this very model."""
    for name, value in section.items() if isinstance(section, Mapping) else section:
        if value is model:
            yield name
        elif isinstance(value, BaseModel | Mapping):
            yield from (f"{name}.{rest}" for rest in _keys_of(value, model))
