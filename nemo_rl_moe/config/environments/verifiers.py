# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver that is an environment of the verifiers library."""

from typing import Any, ClassVar, Literal

from nemo_rl_moe.config.environments.base import DriverConfig
from nemo_rl_moe.config.schema_base import Text


class VerifiersConfig(DriverConfig):
    """An environment of the verifiers library, with its prompts, tools and rubric."""

    kind: Literal["verifiers"]
    """Name of this kind of driver."""
    id: Text
    """Name of the environment, such as gsm8k."""
    arguments: dict[str, Any]
    """Arguments of the environment's `load_environment`. {}: none."""

    scoring = "by_driver"
    has_own_prompts: ClassVar[bool] = True
    has_own_tools: ClassVar[bool] = True

    @property
    def named(self) -> str | None:
        return f"verifiers {self.id}"
