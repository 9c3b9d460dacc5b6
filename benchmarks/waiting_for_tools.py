# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Share of a rollout in which the engine waits for tools, in simulated time. Prints a JSON line.

    python benchmarks/waiting_for_tools.py

A trajectory has 8 turns of about 10 tokens, with a tool of lognormal seconds (median 0.2) between turns. A step has 16
groups of 8, and 0.81 s of training. The clock is virtual, so that the result is reproducible.

- `in_lockstep`: the engine answers when all trajectories wait, like the trainer's engine in synchronous rollouts
- `as_they_come`: the engine takes each request at once, in synchronous rollouts
- `asynchronous`: the same, with groups of later steps in progress, at most `max_staleness` steps ahead
"""

import json
import sys

import numpy as np

from tests.support.simulated_rollouts import Scenario, measure, waiting_in_lockstep

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
STEPS, WARM_UP, ROLLOUTS = 16, 4, 8


def result_of(
    scenario: Scenario, num_steps: int = STEPS, warm_up: int = WARM_UP, num_rollouts: int = ROLLOUTS
) -> dict[str, float | str]:
    """Return the shares of a scenario over `num_steps` steps or, in lockstep, `num_rollouts` rollouts."""
    asynchronous = measure(scenario, scenario.max_staleness, num_steps, warm_up)
    return {
        "scenario": scenario.name,
        "max_staleness": scenario.max_staleness,
        "in_lockstep": round(waiting_in_lockstep(scenario, num_rollouts), 3),
        "as_they_come": round(measure(scenario, 0, num_steps, warm_up).waiting, 3),
        "asynchronous": round(asynchronous.waiting, 3),
    }


def main() -> int:
    """Print the line, and return the exit code."""
    print(json.dumps(result_of(SCENARIO)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
