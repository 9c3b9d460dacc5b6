# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The groups of responses that one step trains on; with dynamic sampling, those that teach something."""

from dataclasses import dataclass

from nemo_rl_moe.algorithms.advantages import informative_groups
from nemo_rl_moe.algorithms.phase_clock import PhaseClock
from nemo_rl_moe.algorithms.prompt_stream import PromptStream
from nemo_rl_moe.algorithms.rollouts import Roller, Rollout, rewards_of
from nemo_rl_moe.config.schema_grpo import GRPOConfig
from nemo_rl_moe.generation.interface import SamplingParameters

# The first number of a seed key: training and validation never share their random numbers.
TRAINING_SEEDS, VALIDATION_SEEDS = 0, 1


@dataclass(frozen=True)
class RolloutGroups:
    """The responses of one step.

    Attributes:
        trained: Those that are trained on, group after group.
        generated: All of them, group after group.
        num_generations: Responses of a group.
        num_rounds: How often responses were generated.
        num_filled: Groups among the trained ones that teach nothing and only fill up the batch.
    """

    trained: list[Rollout]
    generated: list[Rollout]
    num_generations: int
    num_rounds: int
    num_filled: int


def collect_groups(
    config: GRPOConfig,
    roller: Roller,
    prompts: PromptStream,
    sampling: SamplingParameters,
    step: int,
    clock: PhaseClock,
) -> RolloutGroups:
    """Generates until there are enough groups for a step.

    Dynamic sampling (DAPO, https://arxiv.org/abs/2503.14476, section 3.2) replaces the groups whose responses all got
    the same reward by those of further prompts. After `dynamic_sampling_max_gen_batches` rounds, or when no prompts are
    left, they fill up the step: a run goes on where all prompts are too easy or too hard, and a metric tells.

    Args:
        config: The `grpo` section.
        roller: Generates and scores.
        prompts: Gives the prompts of one round after the other; some are left.
        sampling: How tokens are drawn.
        step: Number of the step, for the seeds.
        clock: Times the phases.
    """
    num_generations = config.num_generations_per_prompt
    generated: list[Rollout] = []
    informative: list[list[Rollout]] = []
    others: list[list[Rollout]] = []
    max_rounds = config.dynamic_sampling_max_gen_batches if config.use_dynamic_sampling else 1
    rounds = 0
    while rounds < max_rounds and len(informative) < config.num_prompts_per_step and not prompts.is_used_up:
        seed_key = (config.seed, TRAINING_SEEDS, step, rounds)
        rollouts = roller.roll_out(prompts.take(), num_generations, sampling, seed_key, clock)
        generated += rollouts
        rounds += 1
        is_informative = informative_groups(rewards_of(rollouts, num_generations)).tolist()
        for index, teaches in enumerate(is_informative):
            group = rollouts[index * num_generations : (index + 1) * num_generations]
            # Without dynamic sampling every group is taken as it comes.
            (informative if teaches or not config.use_dynamic_sampling else others).append(group)
    groups = [*informative, *others][: config.num_prompts_per_step]
    return RolloutGroups(
        trained=[rollout for group in groups for rollout in group],
        generated=generated,
        num_generations=num_generations,
        num_rounds=rounds,
        num_filled=max(0, config.num_prompts_per_step - len(informative)),
    )
