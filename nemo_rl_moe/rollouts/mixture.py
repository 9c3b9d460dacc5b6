# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Several environments in one run: each trajectory is driven, scored and watched by the environment of its prompt."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from nemo_rl_moe.data.continuation import Continuation
from nemo_rl_moe.rewards.interface import BatchReward, Score, ScoringItem
from nemo_rl_moe.rollouts.environment import Environment, Session
from nemo_rl_moe.rollouts.faults import FaultWatch
from nemo_rl_moe.rollouts.trajectory import Trajectory, environments_in


@dataclass(frozen=True)
class SessionSettings:
    """What the sessions of an environment are made with.

    Attributes:
        reward_weights: Of each named reward; None where a score is one number.
        continuation: Renders messages that an environment appends; None: there is no chat template.
        timeout_s: Seconds of one trajectory's own code and waiting; None: no limit.
        num_attempts: Most attempts at a trajectory whose environment fails.
    """

    reward_weights: Mapping[str, float] | None
    continuation: Continuation | None
    timeout_s: float | None
    num_attempts: int = 1


class MixedEnvironment:
    """The environment of each prompt, by its name."""

    def __init__(self, environments: Mapping[str, Environment]):
        self._environments = environments

    async def rollout(self, session: Session) -> Trajectory:
        """Make one trajectory."""
        return await self._environments[session.prompt.environment].rollout(session)


class MixedReward:
    """The reward function of each response's environment, all at the same time."""

    def __init__(self, reward_functions: Mapping[str, BatchReward]):
        self._reward_functions = reward_functions

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        """Score each response, in their order."""
        places: dict[str, list[int]] = {}
        for place, item in enumerate(items):
            places.setdefault(item.environment, []).append(place)
        scores: dict[int, Score] = {}
        with ThreadPoolExecutor(max(len(places), 1)) as threads:
            found = {
                name: threads.submit(self._reward_functions[name].score, [items[place] for place in own])
                for name, own in places.items()
            }
            for name, own in places.items():
                scores |= zip(own, found[name].result(), strict=True)
        return [scores[place] for place in range(len(items))]


class MixedFaultWatch:
    """A watch of each environment over its own trajectories: one that fails alone is not hidden by the others."""

    def __init__(self, watches: Mapping[str, FaultWatch]):
        self._watches = watches

    def observe(self, trajectories: Sequence[Trajectory]) -> None:
        """Look at the trajectories of the next generation; environments without any are passed over.

        Raises:
            RewardWorkersFailedError: It is one too many of which an environment could score no response.
        """
        for name, own in environments_in(trajectories).items():
            self._watches[name].observe(own)
