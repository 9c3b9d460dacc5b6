# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Entry for PPO in the registry of estimators. `rl/gae.py` computes its advantages from the values of a critic.

`normalize_rewards` subtracts the mean advantage of all trained tokens of the step, and divides by their standard
deviation.
"""

from nemo_rl_moe.rl.estimators.interface import Estimator
from nemo_rl_moe.rl.estimators.reinforce import reinforce_advantages

GAE = Estimator("gae", reinforce_advantages, baseline="none", of_tokens=True)
"""Before values exist, the advantage is the reward. GAE gives the same with values of 0 and no discount."""
