# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Entry of PPO's advantages by a critic among the estimators. `rl/gae.py` computes them from its values.

`normalize_rewards` subtracts the mean over all trained tokens of the step, and divides by their standard deviation.
"""

from nemo_rl_moe.rl.estimators.interface import Estimator
from nemo_rl_moe.rl.estimators.reinforce import reinforce_advantages

GAE = Estimator("gae", reinforce_advantages, baseline="none")
"""Before values exist, the advantage is the reward, which equals that of values of 0 without a discount."""
