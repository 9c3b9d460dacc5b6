# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Advantages by a critic: its name among the estimators, for PPO. They are computed in `rl/gae.py`, from its values."""

from nemo_rl_moe.rl.estimators.interface import Estimator
from nemo_rl_moe.rl.estimators.reinforce import reinforce_advantages, rewards_are_not_scaled

GAE = Estimator("gae", reinforce_advantages, baseline="none", rules=(rewards_are_not_scaled,))
"""Before there are values: the reward, which is the advantage by values of 0 without a discount."""
