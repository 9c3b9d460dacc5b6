# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Trial call of a custom algorithm's loss functions, before anything starts."""

from collections.abc import Callable, Iterator, Mapping

import torch

from nemo_rl_moe.config.algorithm import ALGORITHM_KEY, Algorithm
from nemo_rl_moe.config.schema import MasterConfig
from nemo_rl_moe.config.user_code import described, error_in_user_code
from nemo_rl_moe.distributed.batch import Column, per_token
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.checked_loss import name_of, problem_of
from nemo_rl_moe.models.interfaces import LossInputs, LossOutputs

_VALUE = 0.5
_SHAPE = (2, 3)


def check_losses(algorithm: Algorithm, config: MasterConfig) -> None:
    """Check each loss function of a custom algorithm by one call, with two sequences of three tokens."""
    if algorithm.reference is None:
        return
    key = f"{ALGORITHM_KEY}: {algorithm.reference}"
    try:
        losses = list(algorithm.losses(config))
    except Exception as error:
        raise ConfigurationError(f"{key}: its losses raised {error_in_user_code(error)}") from error
    for loss_function in losses:
        if not callable(loss_function):
            raise ConfigurationError(f"{key}: one of its losses is {described(loss_function)}, expected a function")
        if problem := _problem_of_trial(loss_function):
            raise ConfigurationError(f"{key}: its loss function {name_of(loss_function)} {problem}")


def _problem_of_trial(loss_function: Callable[[LossInputs], object]) -> str | None:
    try:
        outputs = loss_function(_tried_inputs())
    except (Exception, SystemExit) as error:
        return f"raised in a trial on three tokens: {error_in_user_code(error)}"
    if problem := problem_of(outputs):
        return f"returned {problem}"
    assert isinstance(outputs, LossOutputs)
    if not outputs.loss.requires_grad:
        return "returned a loss without a gradient, expected one that depends on the log-probabilities or the values"
    return None


class _AnyColumn(Mapping[str, Column]):
    """Columns of the trial: every column exists, with the same value at each token."""

    def __getitem__(self, name: str) -> Column:
        return per_token(torch.full(_SHAPE, _VALUE))

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _tried_inputs() -> LossInputs:
    return LossInputs(
        logprobs=torch.tensor([[-1.0, -0.5, 0.0], [-2.0, -1.0, -0.1]], requires_grad=True),
        token_mask=torch.tensor([[True, False, False], [True, True, False]]),
        global_valid_tokens=3,
        global_sequences=2,
        greedy_matches=None,
        columns=_AnyColumn(),
        entropy=torch.full(_SHAPE, _VALUE, requires_grad=True),
        values=torch.full(_SHAPE, _VALUE, requires_grad=True),
        candidates=torch.full((*_SHAPE, 2), -1.0, requires_grad=True),
    )
