# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What a GRPO step says of its responses; the loss and the routing report for themselves."""

from nemo_rl_moe.algorithms.advantages import frac_zero_std_groups
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.environments.interface import fault_metrics
from nemo_rl_moe.rollouts.rollouts import rewards_of, rollout_metrics
from nemo_rl_moe.rollouts.source import RolloutGroups


def group_metrics(groups: RolloutGroups) -> dict[str, float]:
    """Metrics of one step's responses.

    `reward`, `reward_std`, `accuracy`, `mean_gen_tokens_per_sample`, `max_gen_tokens_per_sample`, `truncation_rate`,
    `frac_zero_std_groups` and `env/num_*` tell of all responses that were generated, so that dynamic sampling does not
    hide how the policy does; rewards are the environment's, before any shaping. With more than one round of it:
    `dynamic_sampling/num_gen_batches`, `dynamic_sampling/num_filled_groups`, and `filtered_reward`, the mean of the
    responses that are trained on.
    """
    metrics = rollout_metrics(groups.generated)
    metrics |= fault_metrics([rollout.score for rollout in groups.generated])
    metrics["frac_zero_std_groups"] = frac_zero_std_groups(rewards_of(groups.generated, groups.num_generations))
    if groups.num_rounds > 1 or groups.num_filled:
        metrics["dynamic_sampling/num_gen_batches"] = float(groups.num_rounds)
        metrics["dynamic_sampling/num_filled_groups"] = float(groups.num_filled)
        metrics["filtered_reward"] = float(rewards_of(groups.trained, groups.num_generations).mean())
    return metrics


def advantage_metrics(batch: TokenBatch) -> dict[str, float]:
    """`advantages/{mean,min,max}` over the responses that are trained on, each counted once."""
    advantages = batch.extras["advantages"].double()
    return {
        "advantages/mean": float(advantages.mean()),
        "advantages/min": float(advantages.min()),
        "advantages/max": float(advantages.max()),
    }
