# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The rollout worker: runs many trajectories at the same time, and pools what they ask of the engine and the scorer."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from nemo_rl_moe.data.prompts import Prompt, prompt_inputs
from nemo_rl_moe.environments.interface import BatchScorer, Score, ScoringItem
from nemo_rl_moe.generation.interface import (
    GeneratedSequence,
    GenerationEngine,
    GenerationRequest,
    SamplingParameters,
)
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rollouts.environment import Decode, Encode, Environment, Session
from nemo_rl_moe.rollouts.trajectory import Trajectory

Request = TypeVar("Request")
Result = TypeVar("Result")


class _Pool(Generic[Request, Result]):
    """Requests of many coroutines that wait to be answered together.

    Args:
        answer: Answers many at once; yields the index and the result of each as it is ready.
    """

    def __init__(self, answer: Callable[[Sequence[Request]], Iterable[tuple[int, Result]]]):
        self._answer = answer
        self.waiting: list[tuple[Request, asyncio.Future[Result]]] = []

    def submit(self, request: Request) -> "asyncio.Future[Result]":
        """Queues a request."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self.waiting.append((request, future))
        return future

    def answers(self) -> Iterator[Result]:
        """Has all queued requests answered, and hands each answer to who waits for it, as it is ready."""
        queued, self.waiting = self.waiting, []
        for index, result in self._answer([request for request, _ in queued]):
            queued[index][1].set_result(result)
            yield result


@dataclass(frozen=True)
class RolloutWorker:
    """Makes trajectories: the environment drives each, the engine generates, the scorer scores.

    The driver's own thread does all of it: an engine's call is made when every trajectory waits, so that which requests
    share a batch does not depend on time, and a run can be repeated to the last bit.

    Attributes:
        engine: Generates.
        scorer: Scores responses.
        environment: Drives the trajectories.
        decode: From token ids to text.
        encode: From text to token ids.
        max_tokens: Most tokens of a trajectory.
        watch: Sees the trajectories of each call, and may end the run by an error.
        reward_weights: Of each named reward; None where a score is one number.
    """

    engine: GenerationEngine
    scorer: BatchScorer
    environment: Environment
    decode: Decode
    encode: Encode
    max_tokens: int
    watch: Callable[[Sequence[Trajectory]], None] = lambda trajectories: None
    reward_weights: Mapping[str, float] | None = None

    def run(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        sampling: SamplingParameters,
        seed_key: Sequence[int],
        clock: PhaseClock,
    ) -> list[Trajectory]:
        """Trajectories of each prompt, group after group. The engine stays awake: the source of a step lets it sleep.

        Args:
            prompts: At least one.
            num_generations: Trajectories of each prompt.
            sampling: How tokens are drawn.
            seed_key: Whole numbers that name this call; the same ones give the same trajectories.
            clock: Gets the phases `generation` and `rewards`.

        Raises:
            EnvironmentFailedError: The watch ends the run.
            DataError: An image of a prompt cannot be read any more, or has changed.
        """
        seeds = np.random.SeedSequence(list(seed_key)).generate_state(len(prompts) * num_generations, np.uint64)
        self.engine.wake()
        trajectories = _run_to_the_end(self._run(prompts, num_generations, sampling, seeds.tolist(), clock))
        self.watch(trajectories)
        return trajectories

    async def _run(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        sampling: SamplingParameters,
        seeds: Sequence[int],
        clock: PhaseClock,
    ) -> list[Trajectory]:
        requests: _Pool[GenerationRequest, GeneratedSequence] = _Pool(self.engine.generate)
        items: _Pool[ScoringItem, Score] = _Pool(lambda batch: enumerate(self.scorer.score(batch)))
        loop = asyncio.get_running_loop()
        # The trajectories of a group share the arrays of their images.
        prepared = zip(prompts, prompt_inputs(prompts), strict=True)
        repeated = [pair for pair in prepared for _ in range(num_generations)]
        tasks = [
            loop.create_task(
                self.environment.rollout(
                    Session(
                        prompt=prompt,
                        group_id=f"{prompt.sample_id}#{number // num_generations}",
                        sampling=sampling,
                        seed=seed,
                        max_tokens=self.max_tokens,
                        submit_request=requests.submit,
                        submit_item=items.submit,
                        decode=self.decode,
                        encode=self.encode,
                        reward_weights=self.reward_weights,
                        model_inputs=dict(inputs),
                    )
                )
            )
            for number, ((prompt, inputs), seed) in enumerate(zip(repeated, seeds, strict=True))
        ]
        try:
            while await _all_wait(tasks, requests, items):
                if requests.waiting:
                    await self._generate(requests, clock)
                else:
                    with clock.phase("rewards"):
                        deque(items.answers(), maxlen=0)
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _generate(self, requests: "_Pool[GenerationRequest, GeneratedSequence]", clock: PhaseClock) -> None:
        """Has all queued sequences continued; those that are ready go on while others are still generated."""
        answers = requests.answers()
        while True:
            with clock.phase("generation"):
                sequence = next(answers, None)
            if sequence is None:
                return
            clock.count_tokens("generation", len(sequence.token_ids))
            with clock.phase("rewards"):
                await asyncio.sleep(0)


def _run_to_the_end(trajectories: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine in an event loop of its own; unlike `asyncio.run`, it leaves the handling of signals alone."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(trajectories)
    finally:
        loop.close()


async def _all_wait(tasks: Sequence["asyncio.Task[Trajectory]"], *pools: "_Pool[Any, Any]") -> bool:
    """Lets the trajectories run until each has ended or waits for a pool; whether any waits."""
    while True:
        await asyncio.sleep(0)
        unfinished = sum(not task.done() for task in tasks)
        waiting = sum(len(pool.waiting) for pool in pools)
        if unfinished <= waiting:
            for task in tasks:
                if task.done():
                    task.result()  # an error of one ends all
            return unfinished > 0
        # An environment may wait for something of its own, such as a tool: do not spin meanwhile.
        await asyncio.wait([task for task in tasks if not task.done()], timeout=0.001)
