# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments of a run whose workers have started: each drives, scores and watches the trajectories of its prompts."""

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
    """An environment of a run.

    Attributes:
        driver: Drives its trajectories.
        reward: Scores its responses.
        watch: Sees its trajectories, and may end the run by an error. None for no watch.
        reward_weights: Of each named reward; None where a score is one number.
        continuation: Renders messages that an environment appends; None: there is no chat template.
        timeout_s: Seconds of one trajectory's own code and waiting; None: no limit.
        num_attempts: Most attempts at a trajectory whose environment fails.
    """

    driver: Environment
    reward: BatchReward
    watch: FaultWatch | None = None
    reward_weights: Mapping[str, float] | None = None
    continuation: Continuation | None = None
    timeout_s: float | None = None
    num_attempts: int = 1


Environments = Mapping[str, RunEnvironment]
"""By the name that prompts have; the only environment of a run has the name ''."""


def score_items(environments: Environments, items: Sequence[ScoringItem]) -> list[Score]:
    """Score responses by the reward functions of their environments, all at the same time; return them in order."""
    places: dict[str, list[int]] = {}
    for place, item in enumerate(items):
        places.setdefault(item.environment, []).append(place)
    if len(places) == 1:
        return environments[items[0].environment].reward.score(items)
    scores: dict[int, Score] = {}
    with ThreadPoolExecutor(max(len(places), 1)) as threads:
        found = {
            name: threads.submit(environments[name].reward.score, [items[place] for place in own])
            for name, own in places.items()
        }
        for name, own in places.items():
            scores |= zip(own, found[name].result(), strict=True)
    return [scores[place] for place in range(len(items))]


def watch_trajectories(environments: Environments, trajectories: Sequence[Trajectory]) -> None:
    """Show the trajectories of a step or validation to the watches of their environments."""
    for name, own in environments_in(trajectories).items():
        if (watch := environments[name].watch) is not None:
            watch.observe(own)
