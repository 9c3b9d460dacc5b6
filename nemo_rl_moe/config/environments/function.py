# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver that is the user's function."""

from typing import Literal

from nemo_rl_moe.config.environments.base import DriverConfig
from nemo_rl_moe.config.schema_base import Text


class FunctionConfig(DriverConfig):
    """A coroutine function of the user, which drives a trajectory over one or several turns."""

    kind: Literal["function"]
    """Name of this kind of driver."""
    function: Text
    """`package.module:function`, a coroutine function that takes a `Session` and returns its `Trajectory`."""

    scoring = "by_either"

    @property
    def named(self) -> str | None:
        return self.function
