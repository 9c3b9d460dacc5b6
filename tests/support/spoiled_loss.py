# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A loss function with something wrong in it."""

import math
from dataclasses import dataclass

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.models.interfaces import LossInputs, LossOutputs


@dataclass(frozen=True)
class SpoiledLoss:
    """The loss of fine-tuning with something wrong in the microbatches of one length.

    Attributes:
        kind: `loss`: its value alone is infinite; `gradient`: its gradient is NaN; `both`.
        only_width: Number of targets a row of the microbatches that are spoiled; 0: all.
    """

    kind: str
    only_width: int = 0

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        outputs = sft_loss(inputs)
        if self.only_width and inputs.logprobs.shape[1] != self.only_width:
            return outputs
        loss = outputs.loss
        if self.kind == "gradient":
            spoiled = inputs.logprobs.sum() * 0
            spoiled.register_hook(lambda gradient: gradient * math.nan)
            loss = loss + spoiled
        else:
            loss = loss + (math.inf if self.kind == "loss" else loss * math.nan)
        return LossOutputs(loss, outputs.metrics)
