# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The prompts of one round of generation after the other, over all epochs."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from jaxtyping import Bool, Float
from torch import Tensor

from nemo_rl_moe.config.schema_grpo import GRPOConfig
from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.generation.interface import SamplingParameters
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rollouts.rollouts import Roller, Rollout, rewards_of


class PromptRounds(Protocol):
    """The prompts of each round of generation; `data.prompts.PromptLoader` is one."""

    def __len__(self) -> int:
        """Rounds of one epoch."""
        ...

    def epoch(self, epoch_index: int) -> Iterator[list[Prompt]]:
        """The rounds of one epoch, counted from 0."""
        ...


class PromptStream:
    """Looks one round ahead, so that a loop knows its last step when it comes.

    Args:
        loader: Gives the rounds of each epoch, at least one.
        num_epochs: Passes over the prompts.
        rounds_taken: Rounds, of all epochs, that a run has taken before.

    Attributes:
        rounds_taken: Rounds taken so far.
    """

    def __init__(self, loader: PromptRounds, num_epochs: int, rounds_taken: int = 0):
        first_epoch, first_round = divmod(rounds_taken, len(loader))
        rounds = (prompts for epoch in range(first_epoch, num_epochs) for prompts in loader.epoch(epoch))
        self._rounds = islice(rounds, first_round, None)
        self._next = next(self._rounds, None)
        self.rounds_taken = rounds_taken

    @property
    def is_used_up(self) -> bool:
        """Whether no prompts are left."""
        return self._next is None

    def take(self) -> list[Prompt]:
        """The prompts of the next round; only while they are not used up."""
        assert self._next is not None
        taken, self._next = self._next, next(self._rounds, None)
        self.rounds_taken += 1
        return taken


# The first number of a seed key: training and validation never share their random numbers.
TRAINING_SEEDS, VALIDATION_SEEDS = 0, 1

EQUAL_REWARDS_TOLERANCE = 1e-6
"""Rewards that lie no further apart than this, times the largest of them where that is above 1, are equal."""


def informative_groups(rewards: Float[Tensor, "groups generations"]) -> Bool[Tensor, " groups"]:
    """Which groups have something to learn from: their rewards differ.

    Sums of the same parts in another order differ in the last digits, so rewards count as equal when the largest and
    the smallest of the group lie at most `EQUAL_REWARDS_TOLERANCE * max(1, largest magnitude)` apart.
    """
    exact = rewards.double()
    spread = exact.amax(dim=1) - exact.amin(dim=1)
    magnitude = exact.abs().amax(dim=1).clamp(min=1.0)
    # Asked this way round, a group with a NaN is not taken for one that has nothing to teach.
    return ~(spread <= EQUAL_REWARDS_TOLERANCE * magnitude)


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
