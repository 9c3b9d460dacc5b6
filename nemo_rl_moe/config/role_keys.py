# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Error lines about a role (a model other than the policy), with the keys that the user writes.

Rules and loaders see the role's model as a `policy` section, so their lines name keys of the policy.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from pydantic import BaseModel

from nemo_rl_moe.config.algorithm import roles_of
from nemo_rl_moe.config.schema import MasterConfig
from nemo_rl_moe.config.schema_lora import LoraConfig
from nemo_rl_moe.config.schema_policy import PolicyConfig, RoleModelConfig, RoleParallelConfig, TrainedRoleConfig

_POLICY_KEY = re.compile(r"\bpolicy\.([a-z_]+(?:\.[a-z_]+)*)")
_OTHER_NAMES = {
    "train_micro_batch_size": "logprob_batch_size",
    "megatron_cfg.optimizer.lr": "lr",
    "megatron_cfg.scheduler.lr_warmup_iters": "lr_warmup_iters",
    **dict.fromkeys(("lora", *(f"lora.{name}" for name in LoraConfig.model_fields)), "adapter"),
}
"""Key in `policy` -> key in the role's section, for settings with another name there, if the role has them."""
_UNEVEN_STAGES = re.compile(r"; expected, for one, num_layers_in_first_pipeline_stage=.*")
"""End of an error line, with advice that only applies to the policy."""


def key_of_role(config: MasterConfig, role: str) -> str:
    """Return the full key of the section with a role's model, such as `value`, or `role NAME` if no section has it."""
    return next(_keys_of(config, roles_of(config)[role]), f"role {role}")


def role_problems(config: MasterConfig, role: str, problems: Iterable[str]) -> list[str]:
    """Return error lines about a role's model, with the role's keys in place of the policy's keys."""
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


def lines_on_trained_models(config: MasterConfig, lines_on: Callable[[PolicyConfig], Iterator[str]]) -> Iterator[str]:
    """Yield lines about the policy and about each role that trains, with the role's keys."""
    yield from lines_on(config.policy)
    for role, model in roles_of(config).items():
        if isinstance(model, TrainedRoleConfig):
            yield from role_problems(config, role, lines_on(model.as_policy(config.policy)))


def _own_names(model: RoleModelConfig) -> dict[str, str]:
    """Key in `policy` -> key in the role's section, for the settings that the role has too."""
    fields = type(model).model_fields
    same = [*fields, *(f"megatron_cfg.{name}" for name in RoleParallelConfig.model_fields)]
    same += [f"lora.{name}" for name in LoraConfig.model_fields if "lora" in fields]
    return {name: name for name in same} | {ours: own for ours, own in _OTHER_NAMES.items() if own in fields}


def _keys_of(section: BaseModel | Mapping[str, object], model: RoleModelConfig) -> Iterator[str]:
    """Yield the full keys, relative to a section, whose value is `model` itself (the same object)."""
    for name, value in section.items() if isinstance(section, Mapping) else section:
        if value is model:
            yield name
        elif isinstance(value, BaseModel | Mapping):
            yield from (f"{name}.{rest}" for rest in _keys_of(value, model))
