# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""How well a policy answers prompts that it is not trained on."""

from collections.abc import Sequence
from dataclasses import replace

from nemo_rl_moe.algorithms.pass_at_k import pass_at_k_metrics
from nemo_rl_moe.algorithms.phase_clock import PhaseClock
from nemo_rl_moe.algorithms.rollout_groups import VALIDATION_SEEDS
from nemo_rl_moe.algorithms.rollouts import Roller, Rollout, correctness_of, rollout_metrics
from nemo_rl_moe.algorithms.step_metrics import with_prefix
from nemo_rl_moe.config.schema_grpo import GRPOConfig
from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.environments.faults import fault_metrics
from nemo_rl_moe.generation.interface import SamplingParameters


class Validator:
    """Validates a policy, each time with the same prompts and the same random numbers.

    Args:
        config: The `grpo` section.
        roller: Generates and scores.
        prompts: The held-out prompts.
        sampling: How training responses are drawn; validation has a temperature of its own.

    Attributes:
        rollouts: The responses of the last one.
    """

    def __init__(
        self,
        config: GRPOConfig,
        roller: Roller,
        prompts: Sequence[Prompt],
        sampling: SamplingParameters,
    ):
        self._num_generations = config.val_num_generations
        self._seed_key = (config.seed, VALIDATION_SEEDS)
        self._roller = roller
        self._prompts = [prompts[index] for index in range(min(len(prompts), config.max_val_samples or len(prompts)))]
        self._sampling = replace(sampling, temperature=config.val_temperature)
        self.rollouts: list[Rollout] = []

    def __call__(self) -> dict[str, float]:
        """Validates.

        Returns:
            `val/accuracy` (with several responses to a prompt their mean, so pass@1), `val/pass_at_{k}`, the other
            metrics of responses under `val/`, and `timing/validation/...`.
        """
        clock, inner_clock = PhaseClock(), PhaseClock()
        with clock.phase("validation"):
            self.rollouts = rollouts = self._roller.roll_out(
                self._prompts, self._num_generations, self._sampling, self._seed_key, inner_clock
            )
        clock.count_tokens("validation", sum(len(rollout.response.token_ids) for rollout in rollouts))
        metrics = rollout_metrics(rollouts) | fault_metrics([rollout.score for rollout in rollouts])
        metrics |= pass_at_k_metrics(correctness_of(rollouts, self._num_generations))
        return with_prefix("val", metrics) | clock.metrics()
