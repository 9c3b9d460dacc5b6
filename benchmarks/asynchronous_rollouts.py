# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Speed of asynchronous rollouts over synchronous ones, in simulated time. Prints a JSON line for each scenario.

    python benchmarks/asynchronous_rollouts.py

Dispatcher, group maker, sessions and source are the package's. The engine is simulated, tools and training sleep, and
the clock is virtual, so that the numbers are reproducible on any machine.

- `training_longer`: a demo's step, of which generation takes 0.54 s and training 0.81 s
- `equal`: generation and training take the same time, with responses of lognormal length
- `tools`: 8 turns with tools of lognormal seconds, median 0.2, and turns of lognormal length

`bound`: seconds of a synchronous step over the seconds of its longer part, the most that overlap can gain.
"""

import json
import sys

import numpy as np

from tests.support.simulated_rollouts import Scenario, measure

STEPS, WARM_UP = 40, 8
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


def result_of(scenario: Scenario, num_steps: int = STEPS, warm_up: int = WARM_UP) -> dict[str, float | str]:
    """Return the results of a scenario's two runs."""
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
    """Print a line for each scenario, and return the exit code."""
    for scenario in SCENARIOS:
        print(json.dumps(result_of(scenario)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
