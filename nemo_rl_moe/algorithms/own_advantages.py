# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Estimators of advantages of the user's own, beside those of `advantages.py`."""

import torch
from jaxtyping import Float
from torch import Tensor

from nemo_rl_moe.config.schema_grpo import AdvantageConfig
from nemo_rl_moe.config.user_code import described, import_function, is_own
from nemo_rl_moe.errors import ConfigurationError, one_line

KEY = "grpo.adv_estimator.name"


def own_advantages(
    rewards: Float[Tensor, "groups generations"], config: AdvantageConfig
) -> Float[Tensor, "groups generations"]:
    """Advantages by the function that `config.name` names, which takes the rewards and the section.

    Args:
        rewards: One for each response.
        config: Names the function.

    Returns:
        What it returned, of the rewards' type.

    Raises:
        ConfigurationError: There is no such function, or it returned something else than a finite number for each
            response.
    """
    found = import_function(KEY, config.name, "the rewards and the section adv_estimator", number=2)(rewards, config)
    if not isinstance(found, Tensor) or found.shape != rewards.shape:
        got = f"shape {list(found.shape)}" if isinstance(found, Tensor) else described(found)
        raise ConfigurationError(
            f"{KEY}: {config.name} returned {got}, expected a tensor of shape {list(rewards.shape)}: one advantage for"
            " each response of each group"
        )
    if not bool(found.isfinite().all()):
        raise ConfigurationError(f"{KEY}: {config.name} returned NaN or infinity, expected finite advantages")
    return found.detach().to(rewards.dtype)


def check_estimator(config: AdvantageConfig, num_groups: int, num_generations: int) -> None:
    """Tries an estimator of the user's own on rewards of 0 and 1, before anything is started.

    Of the first group all rewards are 1: the groups without a spread are where estimators divide by 0.

    Raises:
        ConfigurationError: There is no such function, it raises, or what it returns is no advantages.
    """
    if not is_own(config.name):
        return
    rewards = torch.zeros(num_groups, num_generations)
    rewards[0], rewards[1:, 0] = 1.0, 1.0
    try:
        own_advantages(rewards, config)
    except ConfigurationError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigurationError(f"{KEY}: {config.name} raised, on rewards of 0 and 1: {one_line(error)}") from error
