# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The rollout runner, which makes all trajectories for training, validation and evaluation in one event loop."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, count, islice
from typing import Any

import numpy as np

from nemo_rl_moe.data.prompts import Prompt, prompt_inputs
from nemo_rl_moe.distributed.batch import ModelInput
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationEngine, GenerationRequest, SamplingParameters
from nemo_rl_moe.generation.lockstep import LockstepEngine
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rewards.interface import Score, ScoringItem
from nemo_rl_moe.rollouts.dispatch.activity import EngineActivity, TrainerActivity
from nemo_rl_moe.rollouts.dispatch.gate import EngineGate
from nemo_rl_moe.rollouts.ending import ended
from nemo_rl_moe.rollouts.environment import Decode, Encode, Session
from nemo_rl_moe.rollouts.loops import RolloutLoop, cancelled
from nemo_rl_moe.rollouts.run_environment import Environments, score_items, watch_trajectories
from nemo_rl_moe.rollouts.running import RetriedTrajectory, RunningTrajectory, seed_of_attempt
from nemo_rl_moe.rollouts.scoring import ScoringQueue
from nemo_rl_moe.rollouts.supervisor import LockstepQueues, RolloutReports, Supervisor
from nemo_rl_moe.rollouts.trajectory import Trajectory

AddRewards = Callable[[Sequence[Trajectory]], list[Trajectory]]


class RolloutRunner:
    """Makes trajectories: an environment drives them, the engine continues them, a reward function scores them.

    Usually, a trajectory resumes as soon as its sequence has arrived, and is scored as soon as it asks for a score. In
    lockstep, requests wait until every trajectory waits. Then all requested sequences are generated together or, if no
    sequence is requested, all requested scores are computed together. So a run can be repeated bit for bit.

    Args:
        max_tokens: Maximum number of tokens of a trajectory.
        loop: Event loop of all trajectories.
        reports: Receives lines on rollouts that take long.
        add_rewards: Adds rewards to trajectories that have ended, such as those from a reward model.

    Attributes:
        activity, trainer: Record the states of the engines and of the trainer.
        stop_groups: Cancels the training groups. The source of these groups sets it.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        environments: Environments,
        decode: Decode,
        encode: Encode,
        max_tokens: int,
        loop: RolloutLoop,
        *,
        reports: RolloutReports | None = None,
        add_rewards: AddRewards | None = None,
        activity: EngineActivity | None = None,
    ):
        self.engine, self.encode, self.max_tokens = engine, encode, max_tokens
        self._environments, self._decode, self._loop = environments, decode, loop
        self.run = loop.run
        self.activity = activity or EngineActivity()
        self.trainer = TrainerActivity(self.activity.clock)
        self.stop_groups: Callable[[], Coroutine[Any, Any, object]] = _nothing
        self._gate = EngineGate(engine, self.activity)
        in_lockstep = isinstance(engine, LockstepEngine)
        self._scores = ScoringQueue(partial(score_items, environments), in_lockstep=in_lockstep)
        self._added: ScoringQueue[list[Trajectory], list[Trajectory]] | None = None
        if add_rewards is not None:
            self._added = ScoringQueue(partial(_added_to_groups, add_rewards), in_lockstep=in_lockstep)
        queues = LockstepQueues(engine, self._scores, self._added) if isinstance(engine, LockstepEngine) else None
        self._supervisor = Supervisor(reports or RolloutReports(), queues, self._wake_groups)
        self._places = count()
        self._changes: set[asyncio.Event] = set()

    @property
    def clock(self) -> PhaseClock:
        """Clock that adds up the time of the phases `generation`, `rewards` and `reward_model`."""
        return self._supervisor.clock

    @clock.setter
    def clock(self, clock: PhaseClock) -> None:
        self._supervisor.clock = clock

    def groups(
        self,
        prompts: Sequence[Prompt],
        seeds: Sequence[Sequence[int]],
        sampling: SamplingParameters,
        note: Callable[[GeneratedSequence], object] = lambda sequence: None,
    ) -> Iterator[tuple[int, list[Trajectory]]]:
        """Yield the index of a prompt with its group of trajectories, as soon as the group ends.

        Args:
            seeds: Seeds of the trajectories of each prompt.
            note: Called with each sequence.

        Raises:
            RolloutsGivenUpError: The run was asked to stop, and no trajectory makes progress.
            DataError: An image of a prompt cannot be read, or has changed.
        """

        async def begin() -> dict[asyncio.Task[list[Trajectory]], int]:
            self.resume()
            loop = asyncio.get_running_loop()
            return {
                loop.create_task(
                    self.make_group(prompt, f"{prompt.sample_id}#{index}", seeds[index], sampling, note)
                ): index
                for index, prompt in enumerate(prompts)
            }

        async def some(tasks: Mapping[asyncio.Task[list[Trajectory]], int]) -> list[asyncio.Task[list[Trajectory]]]:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return sorted(done, key=tasks.__getitem__)

        tasks = self.run(begin())
        try:
            while tasks:
                for task in self.run(some(tasks)):
                    yield tasks.pop(task), task.result()
        finally:
            self.run(cancelled(tasks))

    def evaluate(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        sampling: SamplingParameters,
        seed_key: Sequence[int],
        report_progress: Callable[[int], object] = lambda num_sequences: None,
    ) -> list[Trajectory]:
        """Return the trajectories of each prompt, group after group, with the engine's current weights.

        Training groups continue meanwhile.

        Args:
            prompts: At least one.
            num_generations: Number of trajectories of each prompt.
            seed_key: Integers that identify this call. The same integers give the same trajectories.
            report_progress: Receives the number of sequences so far.

        Raises:
            RewardWorkersFailedError: Too many steps and validations in a row had no scored response.
            RolloutsGivenUpError: The run was asked to stop, and no trajectory makes progress.
            DataError: An image of a prompt cannot be read, or has changed.
        """
        seeds = np.random.SeedSequence(list(seed_key)).generate_state(len(prompts) * num_generations, np.uint64)
        numbers = count(1)
        self.trainer.validate()
        try:
            found = dict(
                self.groups(
                    prompts,
                    seeds.reshape(len(prompts), num_generations).tolist(),
                    sampling,
                    lambda sequence: report_progress(next(numbers)),
                )
            )
        finally:
            self.trainer.train()
        trajectories = list(chain.from_iterable(found[index] for index in range(len(prompts))))
        self.observe(trajectories)
        return trajectories

    def observe(self, trajectories: Sequence[Trajectory]) -> None:
        """Check the trajectories of a step or validation for faults.

        Raises:
            RewardWorkersFailedError: Too many steps and validations in a row had no scored response.
        """
        watch_trajectories(self._environments, trajectories)

    def close(self) -> None:
        """End the loop with all its tasks."""
        self._loop.close(self.end())

    async def make_group(
        self,
        prompt: Prompt,
        group_id: str,
        seeds: Sequence[int],
        sampling: SamplingParameters,
        note: Callable[[GeneratedSequence], object] = lambda sequence: None,
    ) -> list[Trajectory]:
        """Return the trajectories of one prompt. If this call is cancelled, they are cancelled too.

        Errors of the engine and of the reward function end the run. Errors of a user's environment are faults of its
        trajectory.

        Args:
            seeds: Seed of the first response of each trajectory in its first attempt.
            note: Called with each sequence.

        Raises:
            RolloutsGivenUpError: The run was asked to stop, and no trajectory makes progress.
            DataError: An image of the prompt cannot be read, or has changed.
        """
        self._supervisor.begin()
        changed = asyncio.Event()
        (inputs,) = prompt_inputs([prompt])  # arrays of images that the trajectories share
        place, size = next(self._places), len(seeds)
        group = [
            self._start(prompt, group_id, f"response {number + 1} of {size}", seed, sampling, inputs, changed.set, note)
            for number, seed in enumerate(seeds)
        ]
        self._changes.add(changed)
        self.activity.group_began()
        try:
            while not self._have_ended(group):
                await changed.wait()
                changed.clear()
            return await self._with_added_rewards([each.trajectory for each in group], place)
        finally:
            self._changes.remove(changed)
            self.activity.group_ended()
            await self._leave(group)

    async def settled(self) -> None:
        await self._supervisor.settled()

    async def generate(self, request: GenerationRequest) -> GeneratedSequence:
        return await self._gate.generate(request)

    async def score(self, item: ScoringItem, place: int) -> Score:
        """Return the score of one response.

        In lockstep (the engine answers only when all trajectories wait), all waiting responses are scored together,
        sorted by `place`, the index of the trajectory.
        """
        return await self._scores.ask(item, place)

    async def pause(self) -> None:
        """Wait until the engine has no request. Further requests wait until `resume`."""
        await self._gate.close()

    def resume(self) -> None:
        self.engine.wake()
        self._gate.open()

    def _start(
        self,
        prompt: Prompt,
        group_id: str,
        name: str,
        seed: int,
        sampling: SamplingParameters,
        inputs: Mapping[str, ModelInput],
        note_change: Callable[[], None],
        note: Callable[[GeneratedSequence], object],
    ) -> RetriedTrajectory:
        """Start a trajectory, and return it. Each attempt has a new session."""
        place, environment = next(self._places), self._environments[prompt.environment]

        def begin(attempt: int) -> RunningTrajectory:
            trajectory = RunningTrajectory(self, place, changed, noted)
            session = Session(
                prompt,
                group_id,
                sampling,
                seed_of_attempt(seed, attempt),
                self.max_tokens,
                trajectory,
                self._decode,
                self.encode,
                environment.reward_weights,
                dict(inputs),
                environment.continuation,
            )
            label = f"{prompt.sample_id}, {name}" + (f", attempt {attempt + 1}" if attempt else "")
            coroutine = ended(environment.driver.rollout(session), session)
            trajectory.start(session, label, coroutine, environment.timeout_s)
            self._supervisor.add(trajectory)
            return trajectory

        def changed() -> None:
            self._supervisor.note_change()
            note_change()

        def noted(sequence: GeneratedSequence) -> None:
            self.clock.count_tokens("generation", len(sequence.token_ids))
            note(sequence)

        return RetriedTrajectory(begin, environment.num_attempts)

    def _have_ended(self, group: Sequence[RetriedTrajectory]) -> bool:
        """Return whether all trajectories have ended. Raise the error of a trajectory or of the supervisor."""
        if self._supervisor.failure is not None:
            raise self._supervisor.failure
        for each in group:
            each.look_after()
        return all(each.has_ended for each in group)

    async def _with_added_rewards(self, group: list[Trajectory], place: int) -> list[Trajectory]:
        if self._added is None:
            return group
        self._supervisor.num_adding += 1
        self._supervisor.note_change()
        try:
            return await self._added.ask(group, place)
        finally:
            self._supervisor.num_adding -= 1
            self._supervisor.note_change()

    async def _leave(self, group: Sequence[RetriedTrajectory]) -> None:
        """Remove trajectories from the supervisor and cancel unfinished ones."""
        attempts = [attempt for each in group for attempt in each.attempts]
        for each in attempts:
            self._supervisor.remove(each)
        await cancelled(each.task for each in attempts)

    def _wake_groups(self) -> None:
        for changed in self._changes:
            changed.set()

    async def end(self) -> None:
        """End all groups, then the supervision of their trajectories."""
        await self.stop_groups()
        await self._supervisor.end()


async def _nothing() -> None:
    """Do nothing."""


def _added_to_groups(add_rewards: AddRewards, groups: Sequence[list[Trajectory]]) -> list[list[Trajectory]]:
    """Return several groups with added rewards, after one call of `add_rewards`."""
    found = iter(add_rewards(list(chain.from_iterable(groups))))
    return [list(islice(found, len(group))) for group in groups]
