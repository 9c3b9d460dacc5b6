# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Registry of advantage estimators. To add one, write a module here and add it to the registry."""

from nemo_rl_moe.rl.estimators.gae import GAE
from nemo_rl_moe.rl.estimators.gdpo import GDPO
from nemo_rl_moe.rl.estimators.grpo import GRPO
from nemo_rl_moe.rl.estimators.interface import Estimator
from nemo_rl_moe.rl.estimators.maxrl import MAXRL
from nemo_rl_moe.rl.estimators.optimal_token_baseline import OPTIMAL_TOKEN_BASELINE
from nemo_rl_moe.rl.estimators.reinforce import REINFORCE
from nemo_rl_moe.rl.estimators.reinforce_plus_plus import REINFORCE_PLUS_PLUS, REINFORCE_PLUS_PLUS_BASELINE
from nemo_rl_moe.rl.estimators.turn_grpo import TURN_GRPO

ESTIMATORS: dict[str, Estimator] = {
    estimator.name: estimator
    for estimator in (
        GRPO,
        TURN_GRPO,
        GDPO,
        MAXRL,
        OPTIMAL_TOKEN_BASELINE,
        REINFORCE_PLUS_PLUS,
        REINFORCE_PLUS_PLUS_BASELINE,
        REINFORCE,
        GAE,
    )
}
"""Estimators by their name in `grpo.adv_estimator.name`."""
