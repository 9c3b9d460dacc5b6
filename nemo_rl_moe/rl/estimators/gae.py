# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Advantages by a critic: their name among the estimators, for PPO. They are computed in `rl/gae.py` from its values.

`normalize_rewards` subtracts the mean over all trained tokens of the step, and divides by their standard deviation.
"""

from nemo_rl_moe.rl.estimators.interface import Estimator
from nemo_rl_moe.rl.estimators.reinforce import reinforce_advantages

GAE = Estimator("gae", reinforce_advantages, baseline="none")
"""Before there are values: the reward, which is the advantage by values of 0 without a discount."""
