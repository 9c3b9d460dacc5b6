# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Critic of PPO (arXiv:1707.06347): its values give the advantages of tokens, and it learns their returns."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from nemo_rl_moe.algorithms.advantages import clip_advantages
from nemo_rl_moe.algorithms.grpo_batch import estimator_inputs, failure_rule, shaped_rewards
from nemo_rl_moe.algorithms.losses.divergence import clamped_estimate, kl_estimate
from nemo_rl_moe.algorithms.losses.value import CLIPPED_FRACTION, ValueLoss
from nemo_rl_moe.config.schema_ppo import PPOMasterConfig
from nemo_rl_moe.distributed.batch import Column, TokenBatch
from nemo_rl_moe.metrics import PhaseClock, with_prefix
from nemo_rl_moe.models.kept_tokens import KEPT_TOKENS
from nemo_rl_moe.rl.gae import explained_variance, generalized_advantages, order_in_time, token_rewards, whitened
from nemo_rl_moe.rollouts.source import RolloutGroups
from nemo_rl_moe.rollouts.training_batch import advantage_column, tokens_of_trajectories
from nemo_rl_moe.routing.indexer_replay import INDEXER_POSITIONS
from nemo_rl_moe.routing.replay import ROUTED_EXPERTS

if TYPE_CHECKING:
    from nemo_rl_moe.models.policy.lm_policy import TrainableModel


@dataclass(frozen=True)
class Critic:
    """Critic of a run."""

    config: PPOMasterConfig
    model: "TrainableModel"

    def trains_policy(self, step: int) -> bool:
        """Return whether the policy trains in a step (counted from 1). Otherwise only the critic trains."""
        return step > self.config.ppo.policy_training_start_step

    def with_advantages(
        self, groups: RolloutGroups, batch: TokenBatch, clock: PhaseClock
    ) -> tuple[TokenBatch, dict[str, float]]:
        """Return the batch with values, returns and advantages, and their metrics.

        Args:
            groups: Trajectories of the batch.
            batch: Batch of the trajectories, with log-probabilities of policy and reference model if the divergence is
                in the reward.

        Returns:
            The batch with the columns `advantages`, `returns` and `previous_values`, and metrics of its trained tokens:
            `critic/{values,returns}/{mean,min,max}`, and `critic/explained_variance` if returns differ.
        """
        config, trajectories = self.config, groups.trained
        with clock.phase("values"):
            values = self.model.values(_of_critic(batch))
        inputs = estimator_inputs(config, trajectories, shaped_rewards(config, groups))
        # Returns need the order of time. In alternating conversations, tokens are stored in another order.
        turns, all_masks = inputs.token_turns.flatten(0, 1), tokens_of_trajectories(batch.token_mask, trajectories)
        order = order_in_time(turns, all_masks)
        values, mask, divergence = (
            tokens_of_trajectories(each, trajectories).gather(1, order)
            for each in (values.double(), batch.token_mask, self._divergence(batch))
        )
        rewards = token_rewards(
            inputs.rewards.flatten(), inputs.turn_rewards.flatten(0, 1), turns.gather(1, order), mask
        )
        rewards -= divergence.where(mask, 0.0)
        ppo = config.ppo
        advantages = generalized_advantages(rewards, values, mask, discount=ppo.gae_gamma, decay=ppo.gae_lambda)
        learned = advantages
        if ppo.gae_lambda_value is not None:
            learned = generalized_advantages(rewards, values, mask, discount=ppo.gae_gamma, decay=ppo.gae_lambda_value)
        returns = (learned + values).where(mask, 0.0)
        if config.grpo.adv_estimator.normalize_rewards:
            advantages = whitened(advantages, mask)
        advantages = clip_advantages(advantages, config.grpo.advantage_clip_low, config.grpo.advantage_clip_high)

        def column(in_time: Float[Tensor, "trajectories longest"]) -> Column:
            in_place = torch.zeros(all_masks.shape, dtype=in_time.dtype).scatter(1, order, in_time)
            return advantage_column(list(in_place), trajectories)

        of_groups = advantages.view(-1, groups.num_generations, advantages.shape[1])
        batch = batch.with_columns(
            advantages=column(failure_rule(config).held_down(of_groups, trajectories).flatten(0, 1)),
            returns=column(returns),
            previous_values=column(values.where(mask, 0.0)),
        )
        return batch, with_prefix("critic", _metrics_of(values[mask], returns[mask]))

    def train(self, batch: TokenBatch, clock: PhaseClock) -> dict[str, float]:
        """Train the critic on the returns of a batch.

        Returns:
            `critic/{value_loss,grad_norm,lr,skipped_updates}` and, with a clip range, `critic/clipped_fraction`. Empty
            if the batch has no trained token.
        """
        with clock.phase("critic"):
            loss = ValueLoss(self.config.value_loss_fn.cliprange)
            result = self.model.train(_of_critic(batch), loss)
        if not result.num_updates:
            return {}
        metrics = {
            "value_loss": result.global_loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "skipped_updates": float(result.num_skipped_updates),
        }
        if CLIPPED_FRACTION in result.microbatch_metrics:
            metrics[CLIPPED_FRACTION] = result.microbatch_metrics[CLIPPED_FRACTION].reduce()
        return with_prefix("critic", metrics)

    def _divergence(self, batch: TokenBatch) -> Float[Tensor, "sequences tokens"]:
        """Return each token's divergence penalty, to be subtracted from its reward. 0 if the penalty is in the loss."""
        loss = self.config.loss_fn
        if not loss.use_kl_in_reward:
            return torch.zeros(batch.input_ids.shape, dtype=torch.float64)
        logprobs, reference = (batch.columns[name].values.double() for name in ("prev_logprobs", "reference_logprobs"))
        estimate = kl_estimate(logprobs, reference, loss.reference_policy_kl_type)
        return loss.reference_policy_kl_penalty * clamped_estimate(estimate, loss)


def _of_critic(batch: TokenBatch) -> TokenBatch:
    """Return the batch without the columns that only the policy needs (replayed choices, sampling mask)."""
    return batch.without_stored(ROUTED_EXPERTS, INDEXER_POSITIONS, KEPT_TOKENS)


def _metrics_of(values: Float[Tensor, " tokens"], returns: Float[Tensor, " tokens"]) -> dict[str, float]:
    if not values.numel():
        return {}
    explained = explained_variance(values, returns)
    metrics = {} if math.isnan(explained) else {"explained_variance": explained}
    for name, found in (("values", values), ("returns", returns)):
        of_tokens = {"mean": found.mean(), "min": found.min(), "max": found.max()}
        metrics |= {f"{name}/{which}": float(value) for which, value in of_tokens.items()}
    return metrics
