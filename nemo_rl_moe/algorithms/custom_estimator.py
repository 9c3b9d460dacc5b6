# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Custom estimators of advantages, in addition to those in `rl/estimators`."""

from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.user_code import described, error_in_user_code, import_function, is_custom, named_in_errors
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.rl.estimators import ESTIMATORS
from nemo_rl_moe.rl.estimators.interface import Estimator, EstimatorInputs
from nemo_rl_moe.rl.objectives.rules import tokens_have_their_own_ratio

KEY = "grpo.adv_estimator.name"
_TRIED_TOKENS = 3


def find_estimator(name: str) -> Estimator:
    """Return the configured estimator: a registered one, or a custom function that is imported at its first call.

    A custom function counts as an estimator that compares the responses of a group (`Estimator.baseline`).
    """
    return Estimator(name, partial(_advantages_in_run, name)) if is_custom(name) else ESTIMATORS[name]


def _advantages_in_run(
    name: str, inputs: EstimatorInputs
) -> Float[Tensor, "groups generations"] | Float[Tensor, "groups generations tokens"]:
    with named_in_errors(KEY, name):
        return custom_advantages(name, inputs)


def custom_advantages(
    name: str, inputs: EstimatorInputs
) -> Float[Tensor, "groups generations"] | Float[Tensor, "groups generations tokens"]:
    """Return the advantages that the custom function `name` (`package.module:function`) computes.

    For a response that the environment failed to score and that is not trained on, the function gets the mean reward of
    the other responses in the group, so that this response does not shift the group's mean.
    """
    function = import_function(KEY, name, "the EstimatorInputs")
    found = function(with_group_means(inputs))
    shapes = [inputs.rewards.shape, inputs.token_mask.shape]
    if not isinstance(found, Tensor) or found.shape not in shapes:
        got = f"shape {list(found.shape)}" if isinstance(found, Tensor) else described(found)
        of_responses, of_tokens = map(list, shapes)
        raise ConfigurationError(
            f"{KEY}: {name} returned {got}, expected a tensor of shape {of_responses}: one advantage for each response"
            f" of each group; or {of_tokens}: one for each of its tokens"
        )
    if not bool(found.isfinite().all()):
        raise ConfigurationError(f"{KEY}: {name} returned NaN or infinity, expected finite advantages")
    return found.detach()


def with_group_means(inputs: EstimatorInputs) -> EstimatorInputs:
    """Return inputs in which a response that is not trained on (`takes_part`) has the mean reward of its group.

    The mean is over the group's trained responses or, if the group has none, over those of the step.
    """
    present = inputs.takes_part
    if bool(present.all()):
        return inputs
    named = {name: _with_means(rewards, present) for name, rewards in inputs.named_rewards.items()}
    return replace(inputs, rewards=_with_means(inputs.rewards, present), named_rewards=named)


def _with_means(
    rewards: Float[Tensor, "groups generations"], present: Bool[Tensor, "groups generations"]
) -> Float[Tensor, "groups generations"]:
    counted = rewards.where(present, 0.0)
    means = counted.sum(dim=1, keepdim=True) / present.sum(dim=1, keepdim=True).clamp(min=1)
    of_step = counted.sum() / present.sum().clamp(min=1)
    return rewards.where(present, means.where(present.any(dim=1, keepdim=True), of_step))


def check_estimator(config: GRPOMasterConfig) -> None:
    """Call a custom estimator once with rewards of 0 and 1, before anything starts.

    All rewards of the first group are 1, because estimators often divide by 0 in groups without a spread.
    """
    name = config.grpo.adv_estimator.name
    if not is_custom(name):
        return
    try:
        found = custom_advantages(name, _tried_inputs(config))
    except ConfigurationError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"{KEY}: {name} raised in a trial with rewards of 0 and 1: {error_in_user_code(error)}"
        ) from error
    if found.ndim == 3 and (problems := list(tokens_have_their_own_ratio(config))):
        raise ConfigurationError(problems)


def _tried_inputs(config: GRPOMasterConfig) -> EstimatorInputs:
    shape = (config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt)
    rewards = torch.zeros(shape, dtype=torch.float64)
    rewards[0], rewards[1:, 0] = 1.0, 1.0
    weights = config.named_reward_weights
    return EstimatorInputs(
        rewards=rewards,
        takes_part=torch.ones(shape, dtype=torch.bool),
        config=config.grpo.adv_estimator,
        named_rewards={name: rewards.clone() for name in weights},
        reward_weights=weights,
        group_ids=tuple(f"group:{number}" for number in range(shape[0])),
        num_tokens=torch.full(shape, _TRIED_TOKENS),
        token_mask=torch.ones(*shape, _TRIED_TOKENS, dtype=torch.bool),
        token_turns=torch.zeros(*shape, _TRIED_TOKENS, dtype=torch.long),
        turn_rewards=torch.zeros(*shape, 1, dtype=torch.float64),
    )
