# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Loss of a critic: squared error of its values from the returns, with a limited move from the values before."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from nemo_rl_moe.metrics import Reduction
from nemo_rl_moe.models.interfaces import Head, LossInputs, LossOutputs

CLIPPED_FRACTION = "clipped_fraction"


@dataclass(frozen=True)
class ValueLoss:
    """Fit of values to returns: half the mean clipped squared error over the trained tokens of the whole global batch.

    Columns of the batch, one number a token, anything where masked:

    - `returns`: return of the state in which the token is chosen
    - `previous_values`: value of that state before the update; only with a clip range

    Metrics, means over the trained tokens of the global batch unless said otherwise:

    - `value_mean`, `return_mean`
    - `squared_error`: unclipped
    - `clipped_fraction`: share of the tokens at which the clipped error counts; only with a clip range
    - `num_valid_tokens`: trained tokens of the global batch

    Attributes:
        clip_range: Largest difference from the previous value that still counts; None: any.
    """

    clip_range: float | None = None
    needs: ClassVar[tuple[Head, ...]] = (Head.VALUE,)

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Compute a microbatch's share of the loss."""
        assert inputs.values is not None  # declared
        mask, values = inputs.token_mask, inputs.values
        # Before arithmetic: where masked, columns hold anything, and NaN times 0 is NaN in the gradient too.
        values = values.where(mask, 0.0)
        returns = inputs.per_target("returns").to(values).where(mask, 0.0)
        previous = values.detach()
        if self.clip_range is not None:
            previous = inputs.per_target("previous_values").to(values).where(mask, 0.0)
        errors = clipped_squared_errors(values, returns, previous, self.clip_range)
        plain = (values - returns).square().detach()

        def mean(each: Tensor) -> Float[Tensor, ""]:
            return each.sum() / max(inputs.global_valid_tokens, 1)

        means = {"value_mean": values.detach(), "return_mean": returns, "squared_error": plain}
        if self.clip_range is not None:
            means[CLIPPED_FRACTION] = (errors.detach() > plain).to(values)
        metrics = {name: (mean(each), Reduction.SHARE) for name, each in means.items()}
        metrics["num_valid_tokens"] = (mask.sum(), Reduction.SUM)
        return LossOutputs(loss=0.5 * mean(errors), metrics=metrics)


def clipped_squared_errors(
    values: Float[Tensor, "sequences targets"],
    returns: Float[Tensor, "sequences targets"],
    previous: Float[Tensor, "sequences targets"],
    clip_range: float | None,
) -> Float[Tensor, "sequences targets"]:
    """Compute `max((v - R)^2, (clip(v, v' - c, v' + c) - R)^2)` of each token.

    A value that has moved further than `c` from the value before, `v'`, gets no gradient towards the return; one that
    has moved away from it does. As in the implementation of PPO (arXiv:1707.06347) by its authors.

    Args:
        values: `v`.
        returns: `R`.
        previous: `v'`.
        clip_range: `c`; None: plain squared errors.
    """
    errors = (values - returns).square()
    if clip_range is None:
        return errors
    clipped = previous + (values - previous).clamp(-clip_range, clip_range)
    return torch.maximum(errors, (clipped - returns).square())
