# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Losses for given responses: negative log-likelihood (SFT) and preferences (DPO and related losses)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from nemo_rl_moe.algorithms.losses.pairs import PairMeans
from nemo_rl_moe.config.schema import PreferenceLossConfig
from nemo_rl_moe.data.preferences import REFERENCE_SUMS
from nemo_rl_moe.metrics import Reduction
from nemo_rl_moe.models.interfaces import LossInputs, LossOutputs


def sft_loss(inputs: LossInputs) -> LossOutputs:
    """Return the mean negative log-likelihood of the trained tokens of the global batch.

    The divisor is the global batch's number of trained tokens over all microbatches and ranks. A mean of means would
    give tokens of short sequences more weight, and change with the micro-batch size.

    Returns:
        This microbatch's part of the mean, in nats. The parts add up to the mean. Metrics: `num_valid_tokens`, and in
        evaluation `accuracy`, the share of the trained tokens that the model ranks first given the previous tokens.
    """
    mask = inputs.token_mask
    # A padded position may hold an infinite value, whose product with 0 would be NaN.
    num_valid = max(inputs.global_valid_tokens, 1)
    loss = -inputs.logprobs.where(mask, 0.0).sum() / num_valid
    metrics = {"num_valid_tokens": (mask.sum(), Reduction.SUM)}
    if inputs.greedy_matches is not None:
        metrics["accuracy"] = ((inputs.greedy_matches & mask).sum() / num_valid, Reduction.SHARE)
    return LossOutputs(loss=loss, metrics=metrics)


@dataclass(frozen=True)
class PreferenceLoss:
    """Loss that prefers chosen to rejected responses, relative to a reference model, optionally plus a loss of
    fine-tuning.

    The inputs are pairs of adjacent sequences: the chosen response, then the rejected one. `y` is a response and `x`
    its prompt. `log p(y|x)` is the sum over the response's tokens, or, with `preference_average_log_probs` and
    `sft_average_log_probs`, their mean. With `beta = reference_policy_kl_penalty`:

        h(y) = log p(y|x) - log p_reference(y|x)
        reward(y) = beta * h(y)                                        (DPO, arXiv:2305.18290, eq. 5, without log Z(x))
        loss = preference_loss_weight * preference_loss + sft_loss_weight * sft_loss

    Both losses are means over the pairs of the global batch. `preference_losses` defines `preference_loss`, and
    `sft_loss` is `-log p(chosen|x)`. Values per sequence are computed in float64: sums over long responses are large
    compared with their differences.

    Columns of the batch:

    - `reference_sums`, `[sequences]`: the sum of the response's log-probabilities under the reference model, in nats

    Metrics, which are means over the pairs of the global batch unless noted otherwise:

    - `preference_loss`, `sft_loss`: before their weights
    - `accuracy`: share of the pairs whose chosen response has the higher reward. Equal rewards count as wrong.
    - `rewards_chosen_mean`, `rewards_rejected_mean`: the rewards
    - `reward_margin`: reward of the chosen minus that of the rejected response
    - `logprobs_chosen_mean`, `logprobs_rejected_mean`: sums of the responses' log-probabilities, in nats
    - `num_valid_pairs`, `num_valid_tokens`: numbers of pairs and of response tokens of the global batch
    """

    config: PreferenceLossConfig
    reduction: ClassVar[Reduction] = Reduction.SEQUENCE_SHARE

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        config, mask = self.config, inputs.token_mask
        sums = response_sums(inputs.logprobs, mask)
        reference = inputs.columns[REFERENCE_SUMS].values.to(sums)
        lengths, mean = mask.sum(dim=1).clamp(min=1), PairMeans.of(inputs)
        ratios = sums - reference
        rewards = config.reference_policy_kl_penalty * (
            ratios / lengths if config.preference_average_log_probs else ratios
        )
        margins = rewards[0::2] - rewards[1::2]
        preference = mean(preference_losses(rewards[0::2], rewards[1::2], config))
        sft = mean(-(sums / lengths if config.sft_average_log_probs else sums)[0::2])
        loss = config.preference_loss_weight * preference + config.sft_loss_weight * sft

        means = {
            "preference_loss": preference,
            "sft_loss": sft,
            "accuracy": mean((margins > 0).to(sums)),
            "rewards_chosen_mean": mean(rewards[0::2]),
            "rewards_rejected_mean": mean(rewards[1::2]),
            "reward_margin": mean(margins),
            "logprobs_chosen_mean": mean(sums[0::2]),
            "logprobs_rejected_mean": mean(sums[1::2]),
        }
        return LossOutputs(loss=loss.to(inputs.logprobs.dtype), metrics=mean.metrics(means, inputs))


def response_sums(
    logprobs: Float[Tensor, "sequences targets"], mask: Bool[Tensor, "sequences targets"]
) -> Float[Tensor, " sequences"]:
    """Return the log-probability of each response: the sum of its tokens' log-probabilities, in nats, in float64.

    Args:
        logprobs: Log-probability of each token. Masked values may be anything.
        mask: True on the tokens of the response.
    """
    return logprobs.where(mask, 0.0).sum(dim=1, dtype=torch.float64)


def preference_losses(
    chosen: Float[Tensor, " pairs"], rejected: Float[Tensor, " pairs"], config: PreferenceLossConfig
) -> Float[Tensor, " pairs"]:
    """Return the loss of each pair, with `margin = chosen - rejected` and `e = label_smoothing`.

    `e` is the assumed share of pairs with swapped labels.

    - `sigmoid`: `-(1 - e) log sigmoid(margin) - e log sigmoid(-margin)`. With `e = 0` it is DPO (arXiv:2305.18290, eq.
      7), otherwise conservative DPO (Mitchell 2023, "A note on DPO with noisy preferences & relationship to IPO").
    - `robust`: `(-(1 - e) log sigmoid(margin) + e log sigmoid(-margin)) / (1 - 2 e)`. Its expectation over swapped
      labels is DPO's loss with the right labels (arXiv:2403.00409).
    - `hinge`: `max(0, 1 - margin)` (SLiC, arXiv:2305.10425, with the margin of DPO): no gradient beyond a margin of 1.
    - `ipo`: `(margin / beta - 1 / (2 beta))^2` (IPO, arXiv:2310.12036, eq. 17, whose tau is beta).
    - `apo_zero`: `1 - sigmoid(chosen) + sigmoid(rejected)` (APO, arXiv:2408.06266, eq. 7), if chosen responses are
      better than the reference's. Chosen responses become likelier, and rejected ones less likely.
    - `apo_down`: `sigmoid(chosen) + 1 - sigmoid(margin)` (eq. 8 there), if responses are worse than the reference's.
      Both become less likely, rejected ones more so.

    Args:
        chosen: Rewards of the chosen responses, including `beta`.
    """
    margins, kind = chosen - rejected, config.preference_loss_type
    if kind == "ipo":
        beta = config.reference_policy_kl_penalty
        return (margins / beta - 1 / (2 * beta)).square()
    if kind == "hinge":
        return torch.relu(1 - margins)
    if kind == "apo_zero":
        return 1 - chosen.sigmoid() + rejected.sigmoid()
    if kind == "apo_down":
        return chosen.sigmoid() + 1 - margins.sigmoid()
    smoothing = config.label_smoothing
    right, wrong = -(1 - smoothing) * logsigmoid(margins), smoothing * logsigmoid(-margins)
    return right - wrong if kind == "sigmoid" else (right + wrong) / (1 - 2 * smoothing)
