# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rollouts in simulated time: the package's own dispatcher, sessions and source over a model of an engine.

Tools and training sleep, and the clock is virtual, so that two runs are the same on every machine.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

import numpy as np

from nemo_rl_moe.config.files import exemplars_folder
from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.data.prompts import Prompt, PromptLoader
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationEngine, GenerationRequest, SamplingParameters
from nemo_rl_moe.generation.lockstep import LockstepEngine
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rewards.interface import Score, ScoringItem
from nemo_rl_moe.rollouts.dispatch.activity import EngineActivity
from nemo_rl_moe.rollouts.dispatch.admission import Bounds
from nemo_rl_moe.rollouts.dispatch.source import SampledGroups, feed_of_epochs
from nemo_rl_moe.rollouts.dispatch.staleness import make_policy
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.loops import CallersLoop
from nemo_rl_moe.rollouts.run_environment import RunEnvironment
from nemo_rl_moe.rollouts.runner import RolloutRunner
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.runs.folder.time_line import FOR_ENVIRONMENT, GENERATING, StepActivity, TimeLine, seconds_of
from nemo_rl_moe.weight_sync.transport import WeightTransport
from tests.support.clocks_and_disks import VirtualLoop

GROUPS, GENERATIONS = 16, 8
SAMPLING = SamplingParameters(max_new_tokens=100_000, stop_token_ids=(0,))


@dataclass(frozen=True)
class Scenario:
    """What a run simulates.

    Attributes:
        name: Of the JSON line.
        train_s: Seconds of training in a step.
        tokens: Draws the tokens of a turn.
        num_turns: Turns of a trajectory.
        tool_s: Draws the seconds of a tool, which follows each turn but the last.
        max_staleness: Of the asynchronous run, in optimizer steps.
        step_s, row_s: Seconds of a decoding step, and of each sequence in it.
    """

    name: str
    train_s: float
    tokens: Callable[[np.random.Generator], float]
    num_turns: int
    tool_s: Callable[[np.random.Generator], float]
    max_staleness: int
    step_s: float = 0.01
    row_s: float = 0.0


def size_of(scenario: Scenario, request: GenerationRequest) -> int:
    """Return the number of tokens of a response; it depends on the request's seed alone."""
    return max(1, round(scenario.tokens(np.random.default_rng(request.seed))))


def response_of(size: int) -> GeneratedSequence:
    return GeneratedSequence(np.zeros(size, dtype=np.int64), np.zeros(size), False, 0)


class SimulatedEngine(GenerationEngine):
    """Decodes all its sequences together, a token of each in a step; new ones join at once, as in vLLM."""

    def __init__(self, scenario: Scenario):
        self._scenario = scenario
        self._running: list[tuple[float, int, asyncio.Event]] = []
        """Heap of the decoding steps after which each sequence ends."""
        self._numbers = count()
        self._steps, self._since_s = 0.0, 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def generate(self, request: GenerationRequest) -> GeneratedSequence:
        size = size_of(self._scenario, request)
        self._advance()
        ended = asyncio.Event()
        heappush(self._running, (self._steps + size, next(self._numbers), ended))
        self._plan()
        await ended.wait()
        return response_of(size)

    def _advance(self) -> None:
        """Count the decoding steps since the last change; end the sequences that have theirs."""
        now_s = asyncio.get_running_loop().time()
        self._steps += (now_s - self._since_s) / self._seconds_of_a_step
        self._since_s = now_s
        while self._running and self._running[0][0] < self._steps + 1e-6:
            heappop(self._running)[2].set()

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._running:
            wait_s = (self._running[0][0] - self._steps) * self._seconds_of_a_step
            self._timer = asyncio.get_running_loop().call_later(max(0.0, wait_s), self._wake_up)

    def _wake_up(self) -> None:
        self._advance()
        self._plan()

    @property
    def _seconds_of_a_step(self) -> float:
        return self._scenario.step_s + self._scenario.row_s * len(self._running)

    def update_weights(self, transport: WeightTransport, version: int) -> None:
        """Do nothing: there are no weights."""


@dataclass(frozen=True)
class Turns:
    """Turns with a tool between two."""

    scenario: Scenario

    async def rollout(self, session: Session) -> Trajectory:
        random = np.random.default_rng(session.seed)
        for turn in range(self.scenario.num_turns):
            if turn:
                await asyncio.sleep(self.scenario.tool_s(random))
            await session.generate()
        return session.finish(Score(0.0, is_correct=False))


class NoReward:
    """No reward function: trajectories have their scores."""

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        raise AssertionError("a trajectory asked for a score")


@dataclass(frozen=True)
class Measured:
    """Means over the steps of a run.

    Attributes:
        step_s: Seconds of a step.
        engines_idle: Share of them in which the engine has no request.
        generating_s: Seconds of a step in which it has one.
        waiting: Share of the time of rollouts in which it waits for the environment.
    """

    step_s: float
    engines_idle: float
    generating_s: float
    waiting: float


def runner_of(
    scenario: Scenario, engine: GenerationEngine, loop: VirtualLoop, activity: EngineActivity | None = None
) -> RolloutRunner:
    """Return a runner of the scenario's trajectories in virtual time."""
    return RolloutRunner(
        engine,
        {"": RunEnvironment(Turns(scenario), NoReward())},
        str,
        lambda text: (),
        10_000_000,
        CallersLoop(loop),
        activity=activity,
    )


def measure(scenario: Scenario, max_staleness: int, num_steps: int, warm_up: int) -> Measured:
    """Run the scenario in virtual time.

    Args:
        warm_up: Steps at the start, and at the end, that are left out.
    """
    loop, lines = VirtualLoop(most_turns=50_000_000, longest_s=1e9), list[TimeLine]()
    prompts = [Prompt(f"prompt:{number}", "", (1,), {}) for number in range(GROUPS * num_steps)]
    loader = PromptLoader(prompts, GROUPS, seed=0, shuffle=False)
    config = load_grpo_config(
        exemplars_folder() / "grpo_tiny_moe.yaml",
        [
            f"grpo.num_prompts_per_step={GROUPS}",
            f"grpo.num_generations_per_prompt={GENERATIONS}",
            "grpo.rollouts.mode=asynchronous",
            "grpo.rollouts.max_staleness=0",
        ],
        check_paths=False,
    )
    activity = EngineActivity(loop.time)
    runner = runner_of(scenario, SimulatedEngine(scenario), loop, activity)
    policy = make_policy("order", "windowed" if max_staleness else "in_order", Bounds(GROUPS, max_staleness), "wait")
    source = SampledGroups(
        config.grpo,
        runner,
        feed_of_epochs(loader, 1, GROUPS),
        policy,
        SAMPLING,
        len(loader),
        runs_ahead=True,
        record=lines.append,
    )
    try:
        source.updated(0)
        for step in range(num_steps):
            source.next(step, PhaseClock())
            loop.run_until_complete(asyncio.sleep(scenario.train_s))
            source.update_pending(step + 1)
            source.updated(step + 1)
        source.stop()
    finally:
        runner.close()
    return _means([line.steps[-1] for line in lines][warm_up:-warm_up])


def _means(steps: Sequence[StepActivity]) -> Measured:
    total_s = sum(step.seconds for step in steps)
    generating_s = sum(seconds_of(step.engines, GENERATING) for step in steps)
    waiting_s = sum(seconds_of(step.engines, FOR_ENVIRONMENT) for step in steps)
    return Measured(
        step_s=total_s / len(steps),
        engines_idle=1 - generating_s / total_s,
        generating_s=generating_s / len(steps),
        waiting=waiting_s / (waiting_s + generating_s),
    )


class SimulatedLockstep(LockstepEngine):
    """Decodes a batch until its longest response ends, while time passes for nobody else.

    Attributes:
        batches: Seeds of the requests of each batch.
        busy_s: Seconds of all batches.
    """

    def __init__(self, scenario: Scenario, loop: VirtualLoop):
        super().__init__(self._batch)
        self._scenario, self._loop = scenario, loop
        self.batches: list[list[int]] = []
        self.busy_s = 0.0

    def _batch(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, GeneratedSequence]]:
        sizes = [size_of(self._scenario, request) for request in requests]
        seconds = max(sizes) * self._scenario.step_s + sum(sizes) * self._scenario.row_s
        self._loop.let_pass(seconds)
        self.busy_s += seconds
        self.batches.append([request.seed for request in requests])
        yield from enumerate(map(response_of, sizes))


def run_in_lockstep(scenario: Scenario, seed: int, groups: int = GROUPS) -> tuple[SimulatedLockstep, float]:
    """Run one synchronous rollout, and return its engine and its virtual seconds."""
    loop = VirtualLoop(most_turns=50_000_000, longest_s=1e9)
    engine = SimulatedLockstep(scenario, loop)
    prompts = [Prompt(f"prompt:{number}", "", (1,), {}) for number in range(groups)]
    runner = runner_of(scenario, engine, loop)
    runner.evaluate(prompts, GENERATIONS, SAMPLING, (0, seed))
    return engine, loop.time()


def waiting_in_lockstep(scenario: Scenario, num_rollouts: int) -> float:
    """Return the share of some rollouts in which the engine waits."""
    runs = [run_in_lockstep(scenario, seed) for seed in range(num_rollouts)]
    return 1 - sum(engine.busy_s for engine, _ in runs) / sum(seconds for _, seconds in runs)
