# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Speed of asynchronous rollouts over synchronous ones, in simulated time; prints a JSON line for each scenario.

    python benchmarks/asynchronous_rollouts.py

Dispatcher, group maker, sessions and source are the package's own; the engine is a model of one, tools and training
sleep, and the clock is virtual: the numbers depend on no machine, and two runs are the same.

- `training_longer`: a demo's step, of which generation takes 0.54 s and training 0.81 s
- `equal`: generation and training take the same time, with responses of lognormal length
- `tools`: 8 turns with tools of lognormal seconds, median 0.2, and turns of lognormal length

`bound`: seconds of a synchronous step over those of the longer of its two parts, which no overlap can beat.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

import numpy as np

from nemo_rl_moe.data.prompts import Prompt, PromptLoader
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest, SamplingParameters
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rewards.interface import Score, ScoringItem
from nemo_rl_moe.rollouts.asynchronous.activity import EngineActivity
from nemo_rl_moe.rollouts.asynchronous.admission import Bounds
from nemo_rl_moe.rollouts.asynchronous.dispatcher import Dispatcher
from nemo_rl_moe.rollouts.asynchronous.group_maker import GroupMaker
from nemo_rl_moe.rollouts.asynchronous.source import AsynchronousSource, feed_of_epochs
from nemo_rl_moe.rollouts.asynchronous.staleness import make_policy
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.limits import RolloutLimits
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.rollouts.worker import RolloutWorker
from nemo_rl_moe.runs.folder.time_line import FOR_ENVIRONMENT, GENERATING, StepActivity, TimeLine, seconds_of
from nemo_rl_moe.weight_sync.transport import WeightTransport
from tests.support.virtual_clock import VirtualLoop

GROUPS, GENERATIONS = 16, 8
STEPS, WARM_UP = 40, 8
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


SCENARIOS = (
    Scenario("training_longer", 0.81, lambda random: 54, 1, lambda random: 0.0, 1),
    Scenario("equal", 4.0, lambda random: random.lognormal(np.log(100), 0.5), 1, lambda random: 0.0, 2),
    Scenario(
        "tools",
        2.0,
        lambda random: random.lognormal(np.log(20), 0.7),
        8,
        lambda random: random.lognormal(np.log(0.2), 1.0),
        4,
        row_s=1e-5,
    ),
)


def size_of(scenario: Scenario, request: GenerationRequest) -> int:
    """Return the number of tokens of a response; it depends on the request's seed alone."""
    return max(1, round(scenario.tokens(np.random.default_rng(request.seed))))


def response_of(size: int) -> GeneratedSequence:
    """Return a response of so many tokens."""
    return GeneratedSequence(np.zeros(size, dtype=np.int64), np.zeros(size), False, 0)


class SimulatedEngine:
    """Decodes all its sequences together, a token of each in a step; new ones join at once, as in vLLM."""

    shares_weights = False

    def __init__(self, scenario: Scenario):
        self._scenario = scenario
        self._running: list[tuple[float, int, asyncio.Event]] = []
        """Heap of the decoding steps after which each sequence ends."""
        self._numbers = count()
        self._steps, self._since_s = 0.0, 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def generate(self, request: GenerationRequest) -> GeneratedSequence:
        """Continue one sequence."""
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

    def sleep(self) -> None:
        """Do nothing."""

    def wake(self) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Turns:
    """Turns with a tool between two."""

    scenario: Scenario

    async def rollout(self, session: Session) -> Trajectory:
        """Make one trajectory."""
        random = np.random.default_rng(session.seed)
        for turn in range(self.scenario.num_turns):
            if turn:
                await asyncio.sleep(self.scenario.tool_s(random))
            await session.generate()
        return session.finish(Score(0.0, is_correct=False))


class NoReward:
    """No reward function: trajectories have their scores."""

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        """Return nothing: nobody asks."""
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


def measure(scenario: Scenario, max_staleness: int, num_steps: int = STEPS, warm_up: int = WARM_UP) -> Measured:
    """Run the scenario in virtual time.

    Args:
        warm_up: Steps at the start, and at the end, that are left out.
    """
    loop, lines = VirtualLoop(most_turns=50_000_000, longest_s=1e9), list[TimeLine]()
    prompts = [Prompt(f"prompt:{number}", "", (1,), {}) for number in range(GROUPS * num_steps)]
    loader = PromptLoader(prompts, GROUPS, seed=0, shuffle=False)
    limits = RolloutLimits(timeout_s=None, clock=loop.time)
    worker = RolloutWorker(
        SimulatedEngine(scenario), NoReward(), Turns(scenario), str, lambda text: (), 10_000_000, limits=limits
    )
    activity = EngineActivity(loop.time)
    maker = GroupMaker(worker, SAMPLING, seed=0, groups_per_step=GROUPS, num_generations=GENERATIONS, activity=activity)
    policy = make_policy("order", "windowed" if max_staleness else "in_order", Bounds(GROUPS, max_staleness), "wait")
    dispatcher = Dispatcher(maker.make_group, feed_of_epochs(loader, 1, GROUPS), policy)
    source = AsynchronousSource(
        dispatcher,
        loop.run_until_complete,
        len(loader),
        GENERATIONS,
        pause=maker.pause,
        resume=maker.resume,
        engines=activity,
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
        loop.run_until_complete(maker.close())
    finally:
        loop.close()
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


def result_of(scenario: Scenario, num_steps: int = STEPS, warm_up: int = WARM_UP) -> dict[str, float | str]:
    """Return what a scenario's two runs come to."""
    synchronous, asynchronous = (
        measure(scenario, staleness, num_steps, warm_up) for staleness in (0, scenario.max_staleness)
    )
    bound = synchronous.step_s / max(scenario.train_s, asynchronous.generating_s)
    speedup = synchronous.step_s / asynchronous.step_s
    return {
        "scenario": scenario.name,
        "max_staleness": scenario.max_staleness,
        "train_s": scenario.train_s,
        "generating_s": round(synchronous.generating_s, 3),
        "synchronous_step_s": round(synchronous.step_s, 3),
        "asynchronous_step_s": round(asynchronous.step_s, 3),
        "speedup": round(speedup, 3),
        "bound": round(bound, 3),
        "share_of_bound": round(speedup / bound, 3),
        "engines_idle_synchronous": round(synchronous.engines_idle, 3),
        "engines_idle_asynchronous": round(asynchronous.engines_idle, 3),
    }


def main() -> int:
    """Print a line for each scenario; return the exit code."""
    for scenario in SCENARIOS:
        print(json.dumps(result_of(scenario)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
