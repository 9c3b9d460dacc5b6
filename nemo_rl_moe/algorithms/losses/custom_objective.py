# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Custom objectives, in addition to those in `rl/objectives`."""

from collections.abc import Callable
from functools import cache, partial

import torch
from jaxtyping import Float
from torch import Tensor

from nemo_rl_moe.config.schema_grpo import PolicyGradientLossConfig
from nemo_rl_moe.config.user_code import described, error_in_user_code, import_function, is_custom, named_in_errors
from nemo_rl_moe.errors import ConfigurationError, UserCodeError
from nemo_rl_moe.rl.objectives import OBJECTIVES, Objective, ObjectiveInputs

KEY = "loss_fn.objective"


@cache
def find_objective(name: str) -> Objective:
    """Return the configured objective: a registered one, or a custom function, whose ratio counts as never clipped."""
    if not is_custom(name):
        return OBJECTIVES[name]
    return Objective(name, partial(_loss_in_run, name, import_function(KEY, name, "the ObjectiveInputs")))


def _loss_in_run(
    name: str, function: Callable[[ObjectiveInputs], object], inputs: ObjectiveInputs
) -> Float[Tensor, "sequences targets"]:
    with named_in_errors(KEY, name):
        return _custom_loss(name, function, inputs)


def _custom_loss(
    name: str, function: Callable[[ObjectiveInputs], object], inputs: ObjectiveInputs
) -> Float[Tensor, "sequences targets"]:
    loss = function(inputs)
    if not isinstance(loss, Tensor) or loss.shape != inputs.logprobs.shape:
        found = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else described(loss)
        raise UserCodeError(
            f"{KEY}: {name} returned {found}, expected a tensor of shape {list(inputs.logprobs.shape)}: the loss of"
            " each token"
        )
    return loss


def check_objective(config: PolicyGradientLossConfig) -> None:
    """Call a custom objective once with two sequences of three tokens, before anything starts."""
    if not is_custom(config.objective):
        return
    inputs = _tried_inputs(config)
    logprobs, mask = inputs.logprobs, inputs.mask
    try:
        function = import_function(KEY, config.objective, "the ObjectiveInputs")
        loss = _custom_loss(config.objective, function, inputs)
    except ConfigurationError:
        raise
    except UserCodeError as error:
        raise ConfigurationError(error.problem) from error
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"{KEY}: {config.objective} raised in a trial on three tokens: {error_in_user_code(error)}"
        ) from error
    if not loss.requires_grad:
        raise ConfigurationError(
            f"{KEY}: {config.objective} returned a loss without a gradient, expected one that depends on logprobs or"
            " ratio"
        )
    (gradient,) = torch.autograd.grad(loss[mask].sum(), logprobs, allow_unused=True)
    if not loss[mask].isfinite().all() or gradient is None or not gradient[mask].isfinite().all():
        raise ConfigurationError(
            f"{KEY}: {config.objective} returned a loss whose value or gradient is NaN or infinite in a trial on three"
            " tokens"
        )


def _tried_inputs(config: PolicyGradientLossConfig) -> ObjectiveInputs:
    logprobs = torch.tensor([[-1.0, -0.5, 0.0], [-2.0, -1.0, -0.1]], requires_grad=True)
    constant = logprobs.detach()
    return ObjectiveInputs(
        logprobs=logprobs,
        prev_logprobs=constant,
        generation_logprobs=constant,
        reference_logprobs=constant if config.reference_policy_kl_penalty > 0 else None,
        ratio=(logprobs - constant).exp(),
        log_ratio=logprobs - constant,
        weights=torch.ones_like(constant),
        advantages=torch.tensor([[1.0], [-1.0]]).expand_as(constant),
        mask=torch.tensor([[True, True, False], [True, True, True]]),
        global_valid_tokens=5,
        global_sequences=2,
        config=config,
    )
