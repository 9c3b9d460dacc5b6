# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Sections `env` for tests, over the shipped defaults of their kinds."""

from collections.abc import Mapping
from typing import Any

from nemo_rl_moe.config.files import BASE_OF, exemplars_folder, merge, read_with_defaults
from nemo_rl_moe.config.mixtures import with_mixtures
from nemo_rl_moe.config.schema_environment import EnvironmentConfig


def environment_section(
    reward: str | Mapping[str, Any] | None = "exact", driver: str | Mapping[str, Any] = "single_turn", **changes: Any
) -> EnvironmentConfig:
    """Makes a section; reward, driver: a kind, or a section with one. One worker, with time enough for a busy machine."""
    shipped = read_with_defaults(exemplars_folder() / BASE_OF["grpo"])["env"]
    own = {name: {"kind": each} if isinstance(each, str) else each for name, each in (("reward", reward), ("driver", driver))}
    values = with_mixtures({"env": merge(shipped, {"score_truncated": False, **changes, **own})})["env"]
    del values["mixture"]
    if values["reward"] is not None and "num_workers" in values["reward"]:
        values["reward"] = {**values["reward"], "num_workers": 1, "timeout_s": 60.0, **own["reward"]}
    return EnvironmentConfig.model_validate(values)
