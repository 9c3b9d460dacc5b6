# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Loss functions of a user's own: named in errors, and what they return is checked."""

from typing import Any

import pytest
import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.distributed.worker_process import describe_failure
from nemo_rl_moe.errors import UserCodeError
from nemo_rl_moe.metrics import Reduction
from nemo_rl_moe.models.checked_loss import outputs_of
from nemo_rl_moe.models.interfaces import LossInputs, LossOutputs
from tests.unit.algorithms.policy_loss_reference import random_inputs

SCALAR = torch.tensor(1.0)


class Returns:
    """A loss that returns one thing."""

    def __init__(self, outputs: Any) -> None:
        self._outputs = outputs

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        found: LossOutputs = self._outputs
        return found


def raises(inputs: LossInputs) -> LossOutputs:
    raise KeyError("returns")


def test_what_can_be_used_passes() -> None:
    inputs = random_inputs(seed=1)
    outputs = LossOutputs(SCALAR, {"own": (SCALAR, Reduction.MAX)})
    assert outputs_of(Returns(outputs), inputs) is outputs
    assert outputs_of(sft_loss, inputs).loss.isfinite()


@pytest.mark.parametrize(
    ("outputs", "problem"),
    [
        (SCALAR, "returned tensor(1.) (Tensor), expected a LossOutputs"),
        (LossOutputs(torch.ones(3), {}), "returned a loss of shape [3], expected a tensor of shape []"),
        (
            LossOutputs(SCALAR, {"own": (torch.ones(2, 3), Reduction.SUM)}),
            "returned the metric 'own' of shape [2, 3], expected a tensor of shape []",
        ),
        (LossOutputs(SCALAR, {"own": (torch.ones(1), Reduction.SUM)}), "returned the metric 'own' of shape [1],"),
        (LossOutputs(SCALAR, {"own": (1.0, Reduction.SUM)}), "returned the metric 'own' as 1.0 (float),"),  # type: ignore[dict-item]
        (
            LossOutputs(SCALAR, {"own": SCALAR}),  # type: ignore[dict-item]
            "returned the metric 'own' as tensor(1.) (Tensor), expected a tensor of shape [] with its Reduction",
        ),
    ],
)
def test_what_cannot_be_used_is_named(outputs: object, problem: str) -> None:
    with pytest.raises(UserCodeError) as error:
        outputs_of(Returns(outputs), random_inputs(seed=1))
    assert str(error.value).startswith(f"loss function: {__name__}:Returns {problem}")


def test_an_error_on_a_rank_begins_with_the_function_and_keeps_the_traceback() -> None:
    with pytest.raises(UserCodeError) as error:
        outputs_of(raises, random_inputs(seed=1))
    failure = describe_failure(error.value)
    assert failure.headline.startswith(
        f"loss function: {__name__}:raises raised KeyError: 'returns' (test_checked_loss.py:"
    )
    assert failure.details.startswith("Traceback (most recent call last):")
    assert 'raise KeyError("returns")' in failure.details
