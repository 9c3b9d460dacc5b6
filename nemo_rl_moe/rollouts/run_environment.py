# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments of a run, each of which drives, scores and watches the trajectories of its prompts."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from nemo_rl_moe.data.continuation import Continuation
from nemo_rl_moe.rewards.interface import BatchReward, Score, ScoringItem
from nemo_rl_moe.rollouts.environment import Environment
from nemo_rl_moe.rollouts.faults import FaultWatch
from nemo_rl_moe.rollouts.trajectory import Trajectory, environments_in


@dataclass(frozen=True)
class RunEnvironment:
    """An environment of a run whose workers have started.

    Attributes:
        watch: Checks its trajectories, and may end the run by an error.
        reward_weights: Weight of each named reward. None if a score is one number.
        continuation: Renders messages that an environment appends. None without a chat template.
        timeout_s: Maximum seconds of a trajectory, not counting waits for the engine or the reward. None for no limit.
        num_attempts: Maximum number of attempts at a trajectory whose environment fails.
    """

    driver: Environment
    reward: BatchReward
    watch: FaultWatch | None = None
    reward_weights: Mapping[str, float] | None = None
    continuation: Continuation | None = None
    timeout_s: float | None = None
    num_attempts: int = 1


Environments = Mapping[str, RunEnvironment]
"""`Prompt.environment` -> environment. The only environment of a run has the name ''."""


def score_items(environments: Environments, items: Sequence[ScoringItem]) -> list[Score]:
    """Score responses with the reward functions of their environments in parallel. Return the scores in order."""
    indices: dict[str, list[int]] = {}
    for index, item in enumerate(items):
        indices.setdefault(item.environment, []).append(index)
    if len(indices) == 1:
        return environments[items[0].environment].reward.score(items)
    scores: dict[int, Score] = {}
    with ThreadPoolExecutor(max(len(indices), 1)) as threads:
        found = {
            name: threads.submit(environments[name].reward.score, [items[index] for index in own])
            for name, own in indices.items()
        }
        for name, own in indices.items():
            scores |= zip(own, found[name].result(), strict=True)
    return [scores[index] for index in range(len(items))]


def watch_trajectories(environments: Environments, trajectories: Sequence[Trajectory]) -> None:
    """Pass the trajectories of a step or validation to `watch` of their environments, which may end the run."""
    for name, own in environments_in(trajectories).items():
        if (watch := environments[name].watch) is not None:
            watch.observe(own)
