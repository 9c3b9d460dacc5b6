# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The rollout worker: runs many trajectories at the same time, each as a task of one event loop."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nemo_rl_moe.data.prompts import Prompt, prompt_inputs
from nemo_rl_moe.distributed.batch import ModelInput
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationEngine, SamplingParameters
from nemo_rl_moe.generation.lockstep import Lockstep, LockstepEngine
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rewards.interface import BatchReward, Score, ScoringItem
from nemo_rl_moe.rollouts.environment import Decode, Encode, Environment, Session
from nemo_rl_moe.rollouts.limits import RolloutLimits, RolloutWatch
from nemo_rl_moe.rollouts.running import RunningTrajectory, task_factory
from nemo_rl_moe.rollouts.scoring import ScoringQueue
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.rollouts.trajectory_timer import ThreadTime, TrajectoryTimer

CHECK_S = 0.1
"""Seconds between two looks at the limits, while a trajectory waits for something of its own."""
CLEANUP_S = 5.0
"""Seconds that code may take for its end when it is cancelled."""


@dataclass(frozen=True)
class RolloutWorker:
    """Maker of trajectories: the environment drives each, the engine generates, the reward function scores.

    Each trajectory goes on as soon as its sequence is there, and is scored as soon as it asks for it. With an engine
    that works in lockstep, sequences and then scores are made when every trajectory waits, by this thread: a run can be
    repeated to the last bit.

    Attributes:
        engine: Generates.
        reward_function: Scores responses.
        environment: Drives the trajectories.
        decode: From token ids to text.
        encode: From text to token ids.
        max_tokens: Most tokens of a trajectory.
        watch: Sees the trajectories of each call, and may end the run by an error.
        reward_weights: Of each named reward; None where a score is one number.
        limits: Limits in time.
        report_progress: Receives the number of sequences that a call has so far.
    """

    engine: GenerationEngine
    reward_function: BatchReward
    environment: Environment
    decode: Decode
    encode: Encode
    max_tokens: int
    watch: Callable[[Sequence[Trajectory]], None] = lambda trajectories: None
    reward_weights: Mapping[str, float] | None = None
    limits: RolloutLimits = field(default_factory=RolloutLimits)
    report_progress: Callable[[int], object] = lambda num_sequences: None

    def run(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        sampling: SamplingParameters,
        seed_key: Sequence[int],
        clock: PhaseClock,
    ) -> list[Trajectory]:
        """Return the trajectories of each prompt, group after group. The engine stays awake: the source of a step lets
        it sleep.

        Args:
            prompts: At least one.
            num_generations: Trajectories of each prompt.
            sampling: How tokens are sampled.
            seed_key: Whole numbers that name this call; the same ones give the same trajectories.
            clock: Gets the phases `generation` and `rewards`.

        Raises:
            RewardWorkersFailedError: The watch ends the run.
            RolloutsGivenUpError: The run was asked to stop, and the trajectories make no progress.
            DataError: An image of a prompt cannot be read any more, or has changed.
        """
        seeds = np.random.SeedSequence(list(seed_key)).generate_state(len(prompts) * num_generations, np.uint64)
        thread = ThreadTime(self.limits.clock)
        self.engine.wake()
        with RolloutWatch(self.limits, thread) as watch:
            loop = asyncio.new_event_loop()  # unlike `asyncio.run`, it leaves the handling of signals alone
            try:
                call = _Call(self, sampling, clock, thread, watch)
                trajectories = loop.run_until_complete(call.run(prompts, num_generations, seeds.tolist()))
            finally:
                loop.close()
        self.watch(trajectories)
        return trajectories


class _Call:
    """One call of a worker: trajectories from their prompts to their ends.

    Args:
        worker: The worker.
        sampling: How tokens are sampled.
        clock: Gets the phases `generation` and `rewards`.
        thread: Time of this thread.
        watch: Keeps the limits.
    """

    def __init__(
        self,
        worker: RolloutWorker,
        sampling: SamplingParameters,
        clock: PhaseClock,
        thread: ThreadTime,
        watch: RolloutWatch,
    ):
        self._worker, self._sampling, self._clock = worker, sampling, clock
        self._time, self._watch = thread, watch
        self._engine_in_lockstep = worker.engine if isinstance(worker.engine, LockstepEngine) else None
        score = worker.reward_function.score
        self._scores_in_lockstep: Lockstep[ScoringItem, Score] = Lockstep(lambda batch: enumerate(score(batch)))
        as_they_come, in_lockstep = ScoringQueue(score), self._engine_in_lockstep is not None
        self._ask_for_score: Callable[[ScoringItem], Coroutine[Any, Any, Score]] = (
            self._scores_in_lockstep.ask if in_lockstep else as_they_come.ask
        )
        self._changed = asyncio.Event()
        self._num_sequences = 0

    async def run(self, prompts: Sequence[Prompt], num_generations: int, seeds: Sequence[int]) -> list[Trajectory]:
        """Make the trajectories, group after group."""
        asyncio.get_running_loop().set_task_factory(task_factory(self._time))
        # The trajectories of a group share the arrays of their images.
        prepared = zip(prompts, prompt_inputs(prompts), strict=True)
        repeated = [pair for pair in prepared for _ in range(num_generations)]
        started = [
            self._start(prompt, number, num_generations, seed, inputs)
            for number, ((prompt, inputs), seed) in enumerate(zip(repeated, seeds, strict=True))
        ]
        timers = [each.timer for each in started]
        self._watch.observe(timers, lambda: [each.timer for each in started if each.is_running])
        try:
            while True:
                await asyncio.sleep(0)
                self._keep_limits(started)
                if all(each.has_ended for each in started):
                    return [each.trajectory for each in started]
                if self._engine_in_lockstep is None or any(each.is_running for each in started):
                    await self._wait_for_a_change(started)
                elif self._engine_in_lockstep.is_waited_for:
                    await self._answer(self._engine_in_lockstep, "generation")
                else:
                    await self._answer(self._scores_in_lockstep, "rewards")
        finally:
            await _cancel_all()

    def _start(
        self, prompt: Prompt, number: int, num_generations: int, seed: int, inputs: Mapping[str, ModelInput]
    ) -> RunningTrajectory:
        worker = self._worker
        session = Session(
            prompt=prompt,
            group_id=f"{prompt.sample_id}#{number // num_generations}",
            sampling=self._sampling,
            seed=seed,
            max_tokens=worker.max_tokens,
            submit_request=lambda request: started.wait_for("generation", worker.engine.generate(request), self._count),
            submit_item=lambda item: started.wait_for("rewards", self._ask_for_score(item)),
            decode=worker.decode,
            encode=worker.encode,
            reward_weights=worker.reward_weights,
            model_inputs=dict(inputs),
        )
        coroutine = worker.environment.rollout(session)
        label = f"{prompt.sample_id}, response {number % num_generations + 1} of {num_generations}"
        timer = TrajectoryTimer(label, coroutine, self._time)
        started = RunningTrajectory(session, timer, coroutine, self._note_change)
        return started

    def _note_change(self) -> None:
        self._watch.note_progress()
        self._changed.set()

    def _count(self, sequence: GeneratedSequence) -> None:
        self._clock.count_tokens("generation", len(sequence.token_ids))
        self._num_sequences += 1
        self._worker.report_progress(self._num_sequences)

    def _keep_limits(self, started: Sequence[RunningTrajectory]) -> None:
        """End trajectories that take too long; raise what ends the run."""
        if self._engine_in_lockstep is None and any(each.waits_for for each in started):
            self._watch.note_progress()  # an engine or a reward function that hangs has limits of its own
        self._watch.check_request_to_stop()
        for each in started:
            if not each.has_ended and self._watch.has_expired(each.timer):
                each.expire(self._worker.limits.timeout_text(each.timer.ended_at or each.timer.where()))
            each.check()

    async def _wait_for_a_change(self, started: Sequence[RunningTrajectory]) -> None:
        """Wait until the limits are to be looked at again; in lockstep, at most until a trajectory goes on."""
        if self._engine_in_lockstep is not None:
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await self._changed.wait()
            return
        waits = {each.waits_for for each in started if not each.has_ended}
        phase = next((name for name in ("generation", "rewards") if name in waits), None)
        with self._clock.phase(phase) if phase is not None else nullcontext():
            await asyncio.wait([each.task for each in started], timeout=CHECK_S)

    async def _answer(self, pool: "Lockstep[Any, Any]", phase: str) -> None:
        """Answer all who wait; those whose answer is there go on while others are still answered."""
        answers = pool.answer_all()
        while True:
            with self._clock.phase(phase), self._time.call_for_many():
                if next(answers, None) is None:
                    return
            self._watch.note_progress()
            with self._clock.phase("rewards"):
                await asyncio.sleep(0)


async def _cancel_all() -> None:
    """Cancel all other tasks of the loop; what does not let itself be cancelled is left behind."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=CLEANUP_S)
