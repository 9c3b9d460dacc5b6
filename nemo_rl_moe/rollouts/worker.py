# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The rollout worker: runs many trajectories at the same time, each as a task of one event loop."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from nemo_rl_moe.data.continuation import Continuation
from nemo_rl_moe.data.prompts import Prompt, prompt_inputs
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationEngine, SamplingParameters
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rewards.interface import BatchReward
from nemo_rl_moe.rollouts.environment import Decode, Encode, Environment
from nemo_rl_moe.rollouts.limits import RolloutLimits, RolloutWatch
from nemo_rl_moe.rollouts.mixture import SessionSettings
from nemo_rl_moe.rollouts.pool import TrajectoryPool, cancel_all
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.rollouts.trajectory_timer import ThreadTime


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
        num_attempts: Most attempts at a trajectory whose environment fails.
        report_progress: Receives the number of sequences that a call has so far.
        continuation: Renders messages that an environment appends; None: there is no chat template.
        add_rewards: Adds rewards to trajectories that have ended, such as a reward model's; None: there are none.
        settings: In place of `reward_weights`, `continuation`, `num_attempts` and the limit of a trajectory, those of
            each environment of several, by its name.
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
    num_attempts: int = 1
    report_progress: Callable[[int], object] = lambda num_sequences: None
    continuation: Continuation | None = None
    settings: Mapping[str, SessionSettings] = field(default_factory=dict)
    add_rewards: Callable[[Sequence[Trajectory]], list[Trajectory]] | None = None

    def settings_of(self, prompt: Prompt) -> SessionSettings:
        """Return what a session of a prompt is made with."""
        if prompt.environment in self.settings:
            return self.settings[prompt.environment]
        return SessionSettings(self.reward_weights, self.continuation, self.limits.timeout_s, self.num_attempts)

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
            clock: Gets the phases `generation` and `rewards`, and `reward_model` where there is one.

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
                pool = TrajectoryPool(self, sampling, clock, thread, watch)
                trajectories = loop.run_until_complete(self._run(pool, prompts, num_generations, seeds.tolist(), clock))
            finally:
                loop.close()
        if self.add_rewards is not None:
            with clock.phase("reward_model"):
                trajectories = self.add_rewards(trajectories)
        self.watch(trajectories)
        return trajectories

    async def _run(
        self,
        pool: TrajectoryPool,
        prompts: Sequence[Prompt],
        num_generations: int,
        seeds: Sequence[int],
        clock: PhaseClock,
    ) -> list[Trajectory]:
        """Make the trajectories, group after group."""
        pool.enter()
        num_sequences = count(1)

        def note(sequence: GeneratedSequence) -> None:
            clock.count_tokens("generation", len(sequence.token_ids))
            self.report_progress(next(num_sequences))

        def have_all_ended() -> bool:
            for each in started:
                each.look_after()
            return all(each.has_ended for each in started)

        # The trajectories of a group share the arrays of their images.
        prepared = zip(prompts, prompt_inputs(prompts), strict=True)
        repeated = [pair for pair in prepared for _ in range(num_generations)]
        started = [
            pool.start(
                prompt,
                f"{prompt.sample_id}#{number // num_generations}",
                f"response {number % num_generations + 1} of {num_generations}",
                seed,
                inputs,
                note=note,
            )
            for number, ((prompt, inputs), seed) in enumerate(zip(repeated, seeds, strict=True))
        ]
        try:
            await pool.run_until(have_all_ended)
            return [each.trajectory for each in started]
        finally:
            await cancel_all()
