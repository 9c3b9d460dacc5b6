# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Sections `env` for tests, over the shipped defaults of their kinds."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from nemo_rl_moe.config.environments.openenv import OpenEnvConfig
from nemo_rl_moe.config.environments.rewards import WorkerRewardConfig
from nemo_rl_moe.config.environments.tools import ToolsConfig
from nemo_rl_moe.config.environments.verifiers import VerifiersConfig
from nemo_rl_moe.config.environments.verifiers_v1 import VerifiersV1Config
from nemo_rl_moe.config.files import BASE_OF, exemplars_folder, merge, read_with_defaults
from nemo_rl_moe.config.mixtures import with_mixtures
from nemo_rl_moe.config.schema_environment import EnvironmentConfig

Section = TypeVar("Section", bound=BaseModel)


def environment_section(
    reward: Mapping[str, Any] | None, driver: Mapping[str, Any] | None = None, **changes: Any
) -> EnvironmentConfig:
    """Makes a section. One worker, with time enough on a busy machine."""
    shipped = read_with_defaults(exemplars_folder() / BASE_OF["grpo"])["env"]
    patient = {"num_workers": 1, "timeout_s": 60.0}
    own = {
        "driver": {"kind": "single_turn"} if driver is None else driver,
        "reward": reward if reward is None or reward["kind"] == "reward_model" else {**patient, **reward},
    }
    values = with_mixtures({"env": merge(shipped, {"score_truncated": False, **changes, **own})})["env"]
    return EnvironmentConfig.model_validate({key: value for key, value in values.items() if key != "mixture"})


def reward_section(kind: str, **keys: Any) -> WorkerRewardConfig:
    """Makes the section of a reward."""
    return _of_type(WorkerRewardConfig, environment_section({"kind": kind, **keys}).reward)


def tools_section(**keys: Any) -> ToolsConfig:
    """Makes the section of a driver with tools."""
    limits = {"num_workers": 1, "max_result_characters": 1000, "memory_mb": 100, **keys.pop("limits", {})}
    found = environment_section({"kind": "exact"}, {"kind": "tools", "limits": limits, **keys})
    return _of_type(ToolsConfig, found.driver)


def verifiers_section(name: str, **arguments: Any) -> VerifiersConfig:
    """Makes the section of an environment of verifiers."""
    found = environment_section(None, {"kind": "verifiers", "id": name, "arguments": arguments})
    return _of_type(VerifiersConfig, found.driver)


def verifiers_v1_section(name: str, **keys: Any) -> VerifiersV1Config:
    """Makes the section of a taskset of verifiers.v1."""
    return _of_type(VerifiersV1Config, environment_section(None, {"kind": "verifiers_v1", "id": name, **keys}).driver)


def openenv_section(**keys: Any) -> OpenEnvConfig:
    """Makes the section of an environment of OpenEnv."""
    return _of_type(OpenEnvConfig, environment_section(None, {"kind": "openenv", **keys}).driver)


def _of_type(kind: type[Section], found: object) -> Section:
    assert isinstance(found, kind)
    return found
