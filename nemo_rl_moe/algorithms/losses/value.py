# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Loss of a critic: squared error of its values relative to the returns, with a limited change from previous values."""

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
    """Half the mean clipped squared error between values and returns, over the trained tokens of the global batch.

    Columns of the batch, with one number per token. Masked numbers may be anything.

    - `returns`: return from the state in which the token is chosen
    - `previous_values`: value of that state before the update, only with a clip range

    Metrics, which are means over the trained tokens of the global batch unless noted otherwise:

    - `value_mean`, `return_mean`
    - `squared_error`: squared error without clipping
    - `clipped_fraction`: share of the tokens where the clipped error counts, only with a clip range
    - `num_valid_tokens`: number of trained tokens of the global batch

    Attributes:
        clip_range: Largest difference from the previous value that counts. None means no limit.
    """

    clip_range: float | None = None
    needs: ClassVar[tuple[Head, ...]] = (Head.VALUE,)

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        assert inputs.values is not None  # see `needs`
        mask, values = inputs.token_mask, inputs.values
        # Before arithmetic: masked entries may hold anything, and NaN times 0 is NaN in the gradient too.
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
    """Return `max((v - R)^2, (clip(v, v' - c, v' + c) - R)^2)` of each token.

    A value that has moved further than `c` from the previous value `v'` gets no gradient if it moved towards the
    return, but gets one if it moved away. The authors of PPO (arXiv:1707.06347) do the same in their implementation.

    Args:
        values: `v`.
        returns: `R`.
        previous: `v'`.
        clip_range: `c`. None gives plain squared errors.
    """
    errors = (values - returns).square()
    if clip_range is None:
        return errors
    clipped = previous + (values - previous).clamp(-clip_range, clip_range)
    return torch.maximum(errors, (clipped - returns).square())
