# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Registry of objectives of the policy-gradient loss. To add one, write a module here and add it to the registry.

An objective is the loss of each token before weights, averaging and penalties.
"""

from nemo_rl_moe.rl.objectives.clipped import CISPO, CLIPPED, REINFORCE
from nemo_rl_moe.rl.objectives.covariance import CLIP_COV, KL_COV
from nemo_rl_moe.rl.objectives.dppo import DPPO_KL, DPPO_TV
from nemo_rl_moe.rl.objectives.gmpo import GMPO
from nemo_rl_moe.rl.objectives.interface import Objective, ObjectiveInputs
from nemo_rl_moe.rl.objectives.sapo import SAPO

__all__ = ["OBJECTIVES", "Objective", "ObjectiveInputs"]

OBJECTIVES: dict[str, Objective] = {
    objective.name: objective
    for objective in (CLIPPED, CISPO, REINFORCE, SAPO, GMPO, DPPO_TV, DPPO_KL, CLIP_COV, KL_COV)
}
"""Objectives by their name in `loss_fn.objective`."""
