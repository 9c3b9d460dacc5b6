# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Share of a rollout in which the engine waits for tools, in simulated time; prints a JSON line.

    python benchmarks/waiting_for_tools.py

8 turns of about 10 tokens, with a tool of lognormal seconds (median 0.2) between two; 16 groups of 8, and 0.81 s of
training a step. Parts and clock are those of `asynchronous_rollouts.py`: two runs print the same.

- `in_lockstep`: the engine answers once every trajectory waits, as the trainer's own does in synchronous rollouts
- `as_they_come`: it takes each request at once, in synchronous rollouts
- `asynchronous`: the same, and groups of later steps are in progress, at most `max_staleness` steps ahead
"""

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from unittest.mock import patch

import numpy as np

from benchmarks.asynchronous_rollouts import (
    GENERATIONS,
    GROUPS,
    SAMPLING,
    NoReward,
    Scenario,
    Turns,
    measure,
    response_of,
    size_of,
)
from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest
from nemo_rl_moe.generation.lockstep import LockstepEngine
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rollouts.limits import RolloutLimits
from nemo_rl_moe.rollouts.worker import RolloutWorker
from tests.support.virtual_clock import VirtualLoop

SCENARIO = Scenario(
    "short_turns",
    0.81,
    lambda random: random.lognormal(np.log(10), 0.3),
    8,
    lambda random: random.lognormal(np.log(0.2), 1.0),
    4,
    step_s=0.003,
    row_s=7e-5,
)
STEPS, WARM_UP = 16, 4


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
    worker = RolloutWorker(
        engine, NoReward(), Turns(scenario), str, lambda text: (), 10_000_000, limits=RolloutLimits(timeout_s=None)
    )
    prompts = [Prompt(f"prompt:{number}", "", (1,), {}) for number in range(groups)]
    with patch.object(asyncio, "new_event_loop", lambda: loop):
        worker.run(prompts, GENERATIONS, SAMPLING, (0, seed), PhaseClock())
    return engine, loop.time()


def waiting_in_lockstep(scenario: Scenario, num_rollouts: int = 8) -> float:
    """Return the share of some rollouts in which the engine waits."""
    runs = [run_in_lockstep(scenario, seed) for seed in range(num_rollouts)]
    return 1 - sum(engine.busy_s for engine, _ in runs) / sum(seconds for _, seconds in runs)


def result_of(scenario: Scenario, num_steps: int = STEPS, warm_up: int = WARM_UP) -> dict[str, float | str]:
    """Return the shares of a scenario."""
    asynchronous = measure(scenario, scenario.max_staleness, num_steps, warm_up)
    return {
        "scenario": scenario.name,
        "max_staleness": scenario.max_staleness,
        "in_lockstep": round(waiting_in_lockstep(scenario), 3),
        "as_they_come": round(measure(scenario, 0, num_steps, warm_up).waiting, 3),
        "asynchronous": round(asynchronous.waiting, 3),
    }


def main() -> int:
    """Print the line; return the exit code."""
    print(json.dumps(result_of(SCENARIO)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
