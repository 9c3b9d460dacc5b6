# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics of GRPO's trajectories in a training step, and validation on held-out prompts with pass@k."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nemo_rl_moe.algorithms.advantages import frac_zero_std_groups
from nemo_rl_moe.config.schema_grpo import GRPOConfig
from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.generation.interface import SamplingParameters
from nemo_rl_moe.metrics import PhaseClock, with_prefix
from nemo_rl_moe.rewards.interface import fault_metrics
from nemo_rl_moe.rollouts.failed_responses import FailureRule
from nemo_rl_moe.rollouts.runner import RolloutRunner
from nemo_rl_moe.rollouts.source import VALIDATION_SEEDS, RolloutGroups
from nemo_rl_moe.rollouts.trajectory import (
    Trajectory,
    environments_in,
    group_correctness,
    group_rewards,
    rollout_metrics,
)


def group_metrics(groups: RolloutGroups, failures: FailureRule) -> dict[str, float]:
    """Return the metrics of the trajectories of one step. Empty if no trajectory was generated.

    All generated trajectories count, so that dynamic sampling does not hide the policy's performance. Rewards are the
    environment's unshaped rewards.

    - `reward`, `reward_std`, `accuracy`, `mean_gen_tokens_per_sample`, `max_gen_tokens_per_sample`, `truncation_rate`
    - `truncation_rate_unscored`, if an environment does not score truncated responses
    - `env/num_*` and `env/failed_share`: numbers and share of failed responses
    - `frac_zero_std_groups`: share of groups with equal rewards, among groups with trainable responses
    - `env/num_groups_left_out`: number of groups of the step without trainable responses, because the environment
      failed
    - if dynamic sampling has replaced groups: `dynamic_sampling/num_gen_batches`, the number of generated groups
      divided by the number of trained groups, `dynamic_sampling/num_filled_groups`, and `filtered_reward`, the mean
      reward of trained trajectories
    - `env/NAME/...`: the metrics of each of several environments, with `share`, its share of the step's responses
    """
    if not groups.generated:
        return {}
    metrics = _metrics_of(groups, failures) | dynamic_sampling_metrics(groups, failures)
    return metrics | environment_metrics(groups, failures)


def dynamic_sampling_metrics(groups: RolloutGroups, failures: FailureRule) -> dict[str, float]:
    """Return the metrics of dynamic sampling, if it replaced groups in the step."""
    if len(groups.generated) == len(groups.trained) and not groups.num_filled:
        return {}
    metrics = {
        "dynamic_sampling/num_gen_batches": groups.num_batches,
        "dynamic_sampling/num_filled_groups": float(groups.num_filled),
    }
    if counted := [trajectory.reward for trajectory in failures.counted(groups.trained)]:
        metrics["filtered_reward"] = float(torch.tensor(counted, dtype=torch.float64).mean())
    return metrics


def environment_metrics(groups: RolloutGroups, failures: FailureRule) -> dict[str, float]:
    """Return the metrics of each environment's groups, `env/NAME/...`, in a run with several environments."""
    metrics: dict[str, float] = {}
    trained = environments_in(groups.trained)
    for name, generated in environments_in(groups.generated).items():
        own = RolloutGroups(trained.get(name, []), generated, groups.num_generations, num_filled=0)
        share = {"share": len(own.trained) / max(len(groups.trained), 1)}
        metrics |= of_environment(name, _metrics_of(own, failures) | share)
    return metrics


def of_environment(name: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics of one environment as `env/NAME/...`. Empty without a name, as in a run with one environment."""
    if not name:
        return {}
    return with_prefix(f"env/{name}", {key.removeprefix("env/"): value for key, value in metrics.items()})


def _metrics_of(groups: RolloutGroups, failures: FailureRule) -> dict[str, float]:
    metrics = rollout_metrics(groups.generated, failures.counted(groups.generated))
    metrics |= failures.unscored_metrics(groups.generated)
    metrics |= fault_metrics([trajectory.fault for trajectory in groups.generated])
    takes_part = failures.taking_part(groups.generated, groups.num_generations).any(dim=1)
    if groups.num_generations > 1 and bool(takes_part.any()):  # a group of one has no spread
        rewards = failures.filled(group_rewards(groups.generated, groups.num_generations), groups.generated)
        metrics["frac_zero_std_groups"] = frac_zero_std_groups(rewards[takes_part])
    trained = failures.taking_part(groups.trained, groups.num_generations)
    metrics["env/num_groups_left_out"] = float((~trained.any(dim=1)).sum())
    return metrics


def advantage_metrics(batch: TokenBatch, takes_part: Bool[Tensor, "groups generations"]) -> dict[str, float]:
    """Return `advantages/{mean,min,max}`: over trained tokens if each token has its own advantage.

    Otherwise they are over the trajectories that are trained on (`takes_part`).
    """
    advantages = batch.columns["advantages"].values.double()
    if advantages.ndim > 1:
        advantages = advantages[batch.token_mask]
    else:  # all sequences of a trajectory have its advantage
        advantages = advantages[batch.first_rows_of_samples()][takes_part.reshape(-1)]
    if not advantages.numel():
        return {}
    return {
        "advantages/mean": float(advantages.mean()),
        "advantages/min": float(advantages.min()),
        "advantages/max": float(advantages.max()),
    }


class Validator:
    """Validates a policy, always with the same prompts and random numbers.

    Args:
        sampling: Sampling parameters of training responses. Validation changes the temperature.
        failures: Treatment of responses that the environment failed to score. Such responses are not correct, and their
            rewards count as in training.
        report_progress: Function that receives the number of sequences that have been generated so far.
    """

    def __init__(
        self,
        config: GRPOConfig,
        runner: RolloutRunner,
        prompts: Sequence[Prompt],
        sampling: SamplingParameters,
        failures: FailureRule,
        report_progress: Callable[[int], object] = lambda num_sequences: None,
    ):
        self._failures = failures
        self._num_generations = config.val_num_generations
        self._seed_key = (config.seed, VALIDATION_SEEDS)
        self._runner, self._report_progress = runner, report_progress
        self._prompts = [prompts[index] for index in range(min(len(prompts), config.max_val_samples or len(prompts)))]
        self._sampling = replace(sampling, temperature=config.val_temperature, returns_kept_tokens=False)
        self.trajectories: list[Trajectory] = []

    def __call__(self) -> dict[str, float]:
        """Validate.

        Returns:
            `val/accuracy` (a mean over all responses, so pass@1 with several responses per prompt), `val/pass_at_{k}`,
            other metrics of responses under `val/`, metrics per environment under `val/env/NAME/` if there are several,
            and `timing/validation/...`.
        """
        clock = PhaseClock()
        with clock.phase("validation"):
            self.trajectories = trajectories = self._runner.evaluate(
                self._prompts, self._num_generations, self._sampling, self._seed_key, self._report_progress
            )
        clock.count_tokens("validation", sum(trajectory.num_sampled_tokens for trajectory in trajectories))
        metrics = self._metrics_of(trajectories)
        for name, own in environments_in(trajectories).items():
            metrics |= of_environment(name, self._metrics_of(own))
        return with_prefix("val", metrics) | clock.metrics()

    def _metrics_of(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        metrics = rollout_metrics(trajectories, self._failures.counted(trajectories))
        metrics |= fault_metrics([trajectory.fault for trajectory in trajectories])
        return metrics | pass_at_k_metrics(group_correctness(trajectories, self._num_generations))


def pass_at_k(correct: Int[Tensor, " prompts"], num_generations: int, k: int) -> Float[Tensor, " prompts"]:
    """Return an unbiased estimate of the probability that one of `k` responses is correct (arXiv:2107.03374, eq. 1).

    Of all choices of `k` among a prompt's `n` responses, the estimate is the share with a correct response:
    `1 - C(n-c, k) / C(n, k)`.

    Args:
        correct: Number of correct responses to each prompt, `c`.
        num_generations: Number of responses to each prompt, `n`.
        k: Number of responses, from 1 to `n`.

    Returns:
        The estimate for each prompt, float64.

    Raises:
        ValueError: `k` is not in 1 to `n`.
    """
    if not 1 <= k <= num_generations:
        raise ValueError(f"pass@k needs k from 1 to the number of generations ({num_generations}), got {k}")
    # Integers of any size, divided once, instead of a product of rounded factors.
    ways = math.comb(num_generations, k)
    by_count = [1.0 - math.comb(num_generations - c, k) / ways for c in range(num_generations + 1)]
    return correct.new_tensor(by_count, dtype=torch.float64)[correct]


def pass_at_k_metrics(is_correct: Bool[Tensor, "prompts generations"]) -> dict[str, float]:
    """Return the mean of `pass_at_k` over the prompts, as `pass_at_{k}` (MLflow allows no `@` in a name).

    There is one metric for each of `values_of_k`, and none with one generation, since pass@1 is the accuracy.
    """
    num_generations = is_correct.shape[1]
    correct = is_correct.sum(dim=1)
    return {f"pass_at_{k}": float(pass_at_k(correct, num_generations, k).mean()) for k in values_of_k(num_generations)}


def values_of_k(num_generations: int) -> list[int]:
    """Return the powers of two from 2 to `num_generations`, and `num_generations` itself. Empty for one generation."""
    powers_of_two = {2**exponent for exponent in range(1, num_generations.bit_length())}
    return sorted(powers_of_two | {num_generations} - {1})
