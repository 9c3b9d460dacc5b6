# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Loss of a reward model: the chosen response of a pair should have the higher score (Bradley-Terry)."""

from dataclasses import dataclass
from typing import ClassVar

from torch.nn.functional import logsigmoid

from nemo_rl_moe.algorithms.losses.pairs import PairMeans
from nemo_rl_moe.data.margins import MARGINS
from nemo_rl_moe.metrics import Reduction
from nemo_rl_moe.models.interfaces import Head, LossInputs, LossOutputs


@dataclass(frozen=True)
class RewardLoss:
    """Negative log-likelihood of the preferences under a Bradley-Terry model, with a penalty on scores far from 0.

    The inputs are pairs of adjacent sequences: the chosen response, then the rejected one. With the scores `r`, the
    pair's margin `m` and `c = center_rewards_coefficient`:

        loss = mean(-log sigmoid(r(chosen) - r(rejected) - m)) + c * mean((r(chosen) + r(rejected))^2)

    The first term is that of arXiv:2203.02155, eq. 1, with the margin of arXiv:2307.09288, eq. 2. The second keeps the
    scores around 0 (arXiv:2312.09244, eq. 2). Both are means over the pairs of the global batch. They are computed
    in float64, because scores may be large compared with their differences.

    Columns of the batch:

    - `margins`, `[sequences]`: the margin of each sequence's pair. Without the column, margins are 0.

    Metrics, which are means over the pairs of the global batch unless noted otherwise:

    - `preference_loss`: the first term
    - `center_loss`: the second term before its coefficient, only with a coefficient above 0
    - `accuracy`: share of the pairs whose chosen response has the higher score. Equal scores count as wrong.
    - `rewards_chosen_mean`, `rewards_rejected_mean`: the scores
    - `reward_margin`: score of the chosen minus that of the rejected response
    - `num_valid_pairs`, `num_valid_tokens`: numbers of pairs and of response tokens of the global batch
    """

    center_rewards_coefficient: float
    needs: ClassVar[tuple[Head, ...]] = (Head.SCORE,)
    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_SHARE

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        assert inputs.scores is not None  # see `needs`
        mean, scores = PairMeans.of(inputs), inputs.scores.double()
        chosen, rejected = scores[0::2], scores[1::2]
        differences = chosen - rejected
        margins = inputs.columns[MARGINS].values[0::2].to(scores) if MARGINS in inputs.columns else 0.0
        means = {"preference_loss": mean(-logsigmoid(differences - margins))}
        loss = means["preference_loss"]
        if self.center_rewards_coefficient > 0:
            means["center_loss"] = mean((chosen + rejected).square())
            loss = loss + self.center_rewards_coefficient * means["center_loss"]
        means |= {
            "accuracy": mean((differences > 0).to(scores)),
            "rewards_chosen_mean": mean(chosen),
            "rewards_rejected_mean": mean(rejected),
            "reward_margin": mean(differences),
        }
        return LossOutputs(loss=loss.to(inputs.scores.dtype), metrics=mean.metrics(means, inputs))
