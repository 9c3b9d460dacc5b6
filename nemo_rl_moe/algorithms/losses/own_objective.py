# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Objectives of the user's own, beside those of `policy_gradient.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nemo_rl_moe.config.schema_grpo import PolicyGradientLossConfig
from nemo_rl_moe.config.user_code import described, import_function, is_own
from nemo_rl_moe.errors import ConfigurationError, one_line

KEY = "loss_fn.objective"


@dataclass(frozen=True)
class ObjectiveInputs:
    """Inputs of an objective for one microbatch, all of the same shape; 0 where masked, the ratio 1.

    Attributes:
        logprobs: Log-probability of each sampled token, in nats. Carries the graph.
        ratio: New over old probability of each token; 1 where each step is one update. Carries the graph.
        advantages: Of each token's response; no gradient.
        mask: True where a token counts.
        config: The section `loss_fn`, such as its `ratio_clip_min`.
    """

    logprobs: Float[Tensor, "sequences targets"]
    ratio: Float[Tensor, "sequences targets"]
    advantages: Float[Tensor, "sequences targets"]
    mask: Bool[Tensor, "sequences targets"]
    config: PolicyGradientLossConfig


Objective = Callable[[ObjectiveInputs], Float[Tensor, "sequences targets"]]


@cache
def find_objective(reference: str) -> Objective:
    """The function that a configuration names.

    Raises:
        ConfigurationError: There is no such function, or it does not take one argument.
    """
    function: Objective = import_function(KEY, reference, "the ObjectiveInputs")
    return function


def own_surrogate(inputs: ObjectiveInputs) -> Float[Tensor, "sequences targets"]:
    """Each token's loss by the function that `inputs.config.objective` names.

    Raises:
        ValueError: It returned something else than one number for each token.
    """
    name = inputs.config.objective
    loss = find_objective(name)(inputs)
    if not isinstance(loss, Tensor) or loss.shape != inputs.logprobs.shape:
        found = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else described(loss)
        raise ValueError(
            f"{KEY}: {name} returned {found}, expected a tensor of shape {list(inputs.logprobs.shape)}: the loss of"
            " each token"
        )
    return loss


def check_objective(config: PolicyGradientLossConfig) -> None:
    """Tries an objective of the user's own on three tokens of two sequences, before anything is started.

    Raises:
        ConfigurationError: There is no such function, it raises, or what it returns cannot be trained on.
    """
    if not is_own(config.objective):
        return
    logprobs = torch.tensor([[-1.0, -0.5, 0.0], [-2.0, -1.0, -0.1]], requires_grad=True)
    advantages = torch.tensor([[1.0], [-1.0]]).expand_as(logprobs)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    inputs = ObjectiveInputs(logprobs, (logprobs - logprobs.detach()).exp(), advantages, mask, config)
    try:
        loss = own_surrogate(inputs)
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(_named(config.objective, one_line(error))) from error
    except (Exception, SystemExit) as error:
        raise ConfigurationError(f"{KEY}: {config.objective} raised, on three tokens: {one_line(error)}") from error
    if not loss.requires_grad:
        raise ConfigurationError(
            f"{KEY}: {config.objective} returned a loss without a gradient, expected one that depends on logprobs or"
            " ratio"
        )
    (gradient,) = torch.autograd.grad(loss[mask].sum(), logprobs, allow_unused=True)
    if not loss[mask].isfinite().all() or gradient is None or not gradient[mask].isfinite().all():
        raise ConfigurationError(
            f"{KEY}: {config.objective} returned, on three tokens, a loss or a gradient of it that is NaN or infinite"
        )


def _named(reference: str, text: str) -> str:
    """Text of an error that may name the key already."""
    text = text.removeprefix("ValueError: ")
    return text if text.startswith(KEY) else f"{KEY}: {reference} raised, on three tokens: ValueError: {text}"
