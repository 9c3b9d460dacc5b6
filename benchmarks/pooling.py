# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rollouts of several turns with an engine in lockstep, against the same engine that takes requests as they come.

    python benchmarks/pooling.py --prompts 16 --generations 4 --rounds 5

The engine has no model: a token takes `--token-ms`, whatever else is generated, as on a GPU that has room for all
sequences. Trajectories have 1 to 6 turns of 8 to 128 tokens and a tool call between two turns; lengths and turns are
sampled once. Both contestants run in the same process, one after the other in each round, by the project's own rollout
worker. Prints one line of JSON: seconds of each round, and the median ratio.
"""

import argparse
import asyncio
import heapq
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationEngine, GenerationRequest, SamplingParameters
from nemo_rl_moe.generation.lockstep import LockstepEngine
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rewards.interface import Score, ScoringItem
from nemo_rl_moe.rollouts.environment import RolloutFunction, Session
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.rollouts.worker import RolloutWorker

MOST_TURNS = 6
SHORTEST, LONGEST = 8, 128
TOOL_S = 0.02
SCORE_S = 0.005


def sequence_of(request: GenerationRequest) -> GeneratedSequence:
    """Return a sequence whose length is sampled from the request's seed, evenly in its logarithm."""
    share = np.random.default_rng(request.seed).random()
    length = round(SHORTEST * (LONGEST / SHORTEST) ** share)
    return GeneratedSequence(np.full(length, 5), np.zeros(length, np.float32), False, 0)


def lockstep_engine(token_s: float) -> LockstepEngine:
    """Return the engine in lockstep: a batch ends with its longest sequence, and shorter ones come before."""

    def answers(requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, GeneratedSequence]]:
        started = time.perf_counter()
        found = [
            (len(sequence.token_ids), index, sequence) for index, sequence in enumerate(map(sequence_of, requests))
        ]
        heapq.heapify(found)
        while found:
            length, index, sequence = heapq.heappop(found)
            time.sleep(max(0.0, started + length * token_s - time.perf_counter()))
            yield index, sequence

    return LockstepEngine(answers)


class OpenEngine:
    """The engine, which takes requests as they come."""

    shares_weights = True

    def __init__(self, token_s: float):
        self._token_s = token_s

    async def generate(self, request: GenerationRequest) -> GeneratedSequence:
        """Continue one sequence."""
        sequence = sequence_of(request)
        await asyncio.sleep(len(sequence.token_ids) * self._token_s)
        return sequence

    def update_weights(self, transport: object, version: int) -> None:
        """Do nothing."""

    def sleep(self) -> None:
        """Do nothing."""

    def wake(self) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing."""


class SlowRewardFunction:
    """Scores each response in `SCORE_S`."""

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        """Score all."""
        time.sleep(SCORE_S * len(items))
        return [Score(1.0, is_correct=True) for _ in items]


async def several_turns(session: Session) -> Trajectory:
    """Generate, call a tool, and go on, a number of times that follows from the seed."""
    for _ in range(session.seed % MOST_TURNS):
        await session.generate()
        await asyncio.sleep(TOOL_S)
        session.append([6])
    await session.generate()
    return session.finish(await session.score())


def seconds_of(engine: GenerationEngine, options: argparse.Namespace) -> float:
    """Return the seconds of one generation."""
    environment = RolloutFunction(several_turns, "benchmark")
    longest = MOST_TURNS * (LONGEST + 1) + 8
    worker = RolloutWorker(engine, SlowRewardFunction(), environment, str, lambda text: [6], longest)
    prompts = [Prompt(f"prompt {number}", "?", (number % 50,), {}) for number in range(options.prompts)]
    sampling = SamplingParameters(max_new_tokens=LONGEST)
    started = time.perf_counter()
    worker.run(prompts, options.generations, sampling, (options.seed,), PhaseClock())
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--token-ms", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make: dict[str, Callable[[float], GenerationEngine]] = {"lockstep": lockstep_engine, "as they come": OpenEngine}
    seconds: dict[str, list[float]] = {name: [] for name in make}
    for number in range(options.rounds):
        for name in list(make)[:: 1 if number % 2 == 0 else -1]:
            seconds[name].append(seconds_of(make[name](options.token_ms / 1000), options))
    ratios = [slow / fast for slow, fast in zip(*seconds.values(), strict=True)]
    print(
        json.dumps(
            {
                "name": "pooling",
                "trajectories": options.prompts * options.generations,
                "seconds": {name: [round(value, 3) for value in found] for name, found in seconds.items()},
                "median_ratio": round(statistics.median(ratios), 3),
                "lowest_ratio": round(min(ratios), 3),
            }
        )
    )


if __name__ == "__main__":
    main()
