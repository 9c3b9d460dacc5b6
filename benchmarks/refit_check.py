# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Seconds that the refit check costs a step of GRPO with rollouts by vLLM, on CPU cores. Prints one JSON line.

One run in the package's loop, with the demo's configuration (examples/configs/grpo_tiny_moe_vllm.yaml: 16 prompts x 8
responses, two workers and one engine with a thread each) from random weights. One of two neighbouring refits is
checked, the first and the second alternately, so that other load of the machine affects both. It measures wall-clock
seconds, and CPU seconds of all processes together, which other load changes less.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import psutil
from grpo_throughput import DEFAULT_SIZE, ONE_CHARACTER, STEP_KEY, RandomPrompts, run
from small_model import (
    CONFIGS,
    TOKENIZER,
    StepClock,
    make_parser,
    one_epoch,
    overrides_of,
    positive,
    running_ray,
    surroundings,
)

from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.generation.interface import GenerationEngine
from nemo_rl_moe.generation.refit_check import Gap, RefitCheck

REFIT_KEY, CHECK_KEY = "timing/refit/seconds", "timing/refit_check/seconds"
CPU_STEP_KEY, CPU_CHECK_KEY = "cpu/step", "cpu/refit_and_check"
EXAMPLES = """\
examples:
  python benchmarks/refit_check.py                           after make vllm
  OMP_NUM_THREADS=1 python benchmarks/refit_check.py --pairs 100

cost.median and cpu_cost.median are the ones to quote: what the check adds to the refit and behind it, as a share of a
step without it, by the clock and by the processor. A step as a whole varies by more than that with its responses;
step_difference says by how much. Kernels that the engine packs anew count as the check's, though the next rollout would
have it pack them."""


@dataclass
class EveryOther(RefitCheck):
    """A check that is on, off, off, on, and so on.

    Attributes:
        made: Whether each check so far was made.
        cpu_seconds: CPU seconds of all processes for each refit, when the trainer began to send, and after the check.
    """

    made: list[bool] = field(default_factory=list)
    cpu_seconds: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._clocks: list[int] = []
        self._begun = 0.0

    @property
    def is_on(self) -> bool:
        """Whether the next check is made."""
        return len(self.made) % 4 in (0, 3)

    def begin(self) -> None:
        """Begin the check, if it is made."""
        # All workers and engines exist by now.
        self._clocks = self._clocks or cpu_clocks()
        self._begun = seconds_of(self._clocks)
        if self.is_on:
            super().begin()

    def after_refit(self, engine: GenerationEngine) -> Gap:
        """Make the check, or skip it."""
        gap = super().after_refit(engine) if self.is_on else Gap(0.0, 0.0)
        self.cpu_seconds.append((self._begun, seconds_of(self._clocks)))
        self.made.append(self.is_on)
        return gap


def cpu_clocks() -> list[int]:
    """Return the CPU clocks of this process and all its descendants, with Ray's servers and workers."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    # Like clock_getcpuclockid(3) on Linux: they count all threads of a process, in nanoseconds.
    return [(~process.pid << 3) | 2 for process in processes]


def seconds_of(clocks: Sequence[int]) -> float:
    """Return the CPU time of the processes that have not ended."""
    total = 0.0
    for clock in clocks:
        with suppress(OSError):
            total += time.clock_gettime(clock)
    return total


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    clock, checks = StepClock(), list[EveryOther]()

    def changed(check: RefitCheck | None) -> RefitCheck | None:
        given = {each.name: getattr(check, each.name) for each in fields(RefitCheck)}
        checks.append(EveryOther(**given))
        return checks[-1]

    with tempfile.TemporaryDirectory(prefix="refit_check_") as scratch, ExitStack() as stack:
        config = make_config()
        stack.enter_context(running_ray(config.cluster.cpu_workers_per_node))
        # One more step, since the first refit is before it, and because of one-time work.
        prompts = RandomPrompts(2 * (options.warmup + options.pairs) + 1, config.grpo.num_prompts_per_step)
        run(config, prompts, Path(scratch), clock, stack, changed)
    (check,) = checks
    cpu = [
        {CPU_STEP_KEY: end - before, CPU_CHECK_KEY: end - begin}
        for (_, before), (begin, end) in zip(check.cpu_seconds, check.cpu_seconds[1:], strict=False)
    ]
    measured = [dict(step) | of_step for step, of_step in zip(clock.steps, cpu, strict=True)]
    steps = list(zip(measured, check.made[1:], strict=True))[1 + 2 * options.warmup :]
    result = summary([(steps[index], steps[index + 1]) for index in range(0, len(steps), 2)]) | {
        "pairs": options.pairs,
        "num_sequences": len(check.sequences),
        "num_tokens": len(check.sequences[0]),
        **surroundings(),
    }
    print(json.dumps({"name": "refit_check"} | result))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, EXAMPLES)
    parser.add_argument("--pairs", type=positive, default=40, metavar="N", help="measured pairs (default: 40)")
    parser.add_argument("--warmup", type=positive, default=2, metavar="N", help="pairs before these (default: 2)")
    return parser.parse_args(arguments)


def make_config() -> GRPOMasterConfig:
    """Return the demo's configuration with random weights, prompts and rewards."""
    values: dict[str, Any] = {
        **one_epoch("grpo"),
        "policy.model_name": TOKENIZER,
        "policy.init": "random",
        **ONE_CHARACTER,
    }
    config = load_grpo_config(CONFIGS / "grpo_tiny_moe_vllm.yaml", overrides_of(values), check_paths=False)
    assert config.policy.max_total_sequence_length - config.policy.generation.max_new_tokens >= DEFAULT_SIZE.prompt
    return config


Step = tuple[Mapping[str, float], bool]


def summary(pairs: Sequence[tuple[Step, Step]]) -> dict[str, Any]:
    """Return the seconds with and without the check, and its cost."""
    ordered = [(first, second) if is_on else (second, first) for (first, is_on), (second, _) in pairs]
    off_step = statistics.median(without[STEP_KEY] for _, without in ordered)
    cpu_off_step = statistics.median(without[CPU_STEP_KEY] for _, without in ordered)
    # The trainer's part of the check makes the refit longer.
    costs = [made[REFIT_KEY] + made[CHECK_KEY] - without[REFIT_KEY] for made, without in ordered]
    cpu_costs = [made[CPU_CHECK_KEY] - without[CPU_CHECK_KEY] for made, without in ordered]
    return {
        "step_seconds": {
            "on": round(statistics.median(made[STEP_KEY] for made, _ in ordered), 4),
            "off": round(off_step, 4),
        },
        "refit_seconds": {
            "on": round(statistics.median(made[REFIT_KEY] for made, _ in ordered), 4),
            "off": round(statistics.median(without[REFIT_KEY] for _, without in ordered), 4),
        },
        "check_seconds": spread([made[CHECK_KEY] for made, _ in ordered]),
        "check_share": spread([made[CHECK_KEY] / made[STEP_KEY] for made, _ in ordered]),
        "cost_seconds": spread(costs),
        "cost": spread([cost / off_step for cost in costs]),
        "cpu_seconds": {
            "step": round(cpu_off_step, 4),
            "refit": round(statistics.median(without[CPU_CHECK_KEY] for _, without in ordered), 4),
            "check": spread(cpu_costs),
        },
        "cpu_cost": spread([cost / cpu_off_step for cost in cpu_costs]),
        "step_difference": spread([(made[STEP_KEY] - without[STEP_KEY]) / off_step for made, without in ordered]),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the mean, and the standard error of the mean."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return {
        "median": round(statistics.median(values), 5),
        "mean": round(statistics.fmean(values), 5),
        "standard_error": round(error, 5),
    }


if __name__ == "__main__":
    main()
