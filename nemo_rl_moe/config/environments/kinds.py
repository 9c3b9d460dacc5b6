# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""All kinds of drivers and rewards, as the types of `env.driver` and `env.reward`."""

from typing import Annotated

from pydantic import Field

from nemo_rl_moe.config.environments.agent import AgentConfig
from nemo_rl_moe.config.environments.function import FunctionConfig
from nemo_rl_moe.config.environments.openenv import OpenEnvConfig
from nemo_rl_moe.config.environments.rewards import (
    CallableConfig,
    CustomRewardConfig,
    ExactConfig,
    JudgeConfig,
    MathConfig,
    ReasoningGymConfig,
    RewardModelAloneConfig,
)
from nemo_rl_moe.config.environments.single_turn import SingleTurnConfig
from nemo_rl_moe.config.environments.tools import ToolsConfig
from nemo_rl_moe.config.environments.verifiers import VerifiersConfig
from nemo_rl_moe.config.environments.verifiers_v1 import VerifiersV1Config

Driver = Annotated[
    SingleTurnConfig | FunctionConfig | ToolsConfig | AgentConfig | VerifiersConfig | VerifiersV1Config | OpenEnvConfig,
    Field(discriminator="kind"),
]
Reward = Annotated[
    MathConfig
    | ExactConfig
    | ReasoningGymConfig
    | CallableConfig
    | JudgeConfig
    | RewardModelAloneConfig
    | CustomRewardConfig,
    Field(discriminator="kind"),
]
