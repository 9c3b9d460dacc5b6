# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver of one response."""

from typing import Literal

from nemo_rl_moe.config.environments.base import DriverConfig


class SingleTurnConfig(DriverConfig):
    """One response to the prompt."""

    kind: Literal["single_turn"]
    """Name of this kind of driver."""
