# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Full trainers of TRL and of this package, in turns on one thread. Prints one JSON line.

Both have the same small Qwen3-MoE in float32 and the same sizes of batches of random tokens. `trl_trainers.py` and the
benchmark of the same work run as separate commands, one after the other. A ratio is ours to TRL's, so that above 1 is
faster here, of real tokens per second, or generated tokens in GRPO. `cpu` divides by the CPU time of all processes
(driver, workers and Ray), `wall` by the wall-clock time, which other load disturbs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from small_model import REPOSITORY, make_parser, positive

EXAMPLES = """\
examples:
  make trl && python benchmarks/trl_race.py                         all kinds of work, four pairs each
  taskset -c 0 python benchmarks/trl_race.py --work sft,dpo         everything on one core
  python benchmarks/trl_race.py --pairs 1 --steps 5                 a look

median is the one to quote, of ratios of neighbours in time; least and most are the pairs' extremes. peak_gigabytes is
the sum of the largest resident memory of each process."""
BENCHMARKS = Path(__file__).parent


@dataclass(frozen=True)
class Work:
    """One kind of work.

    Attributes:
        theirs: Name in `trl_trainers.py`.
        ours: File of the benchmark.
        modes: Names of our modes, with the keys of their speeds in the benchmark's output.
        goal: Target of the ratio.
        both: Further options of both sides.
        mine: Further options of our side.
    """

    theirs: str
    ours: str
    modes: Mapping[str, tuple[str, ...]]
    goal: float
    both: Sequence[str] = ()
    mine: Sequence[str] = ()

    def options(self, steps: int) -> list[str]:
        """Return the benchmark's options."""
        if self.ours != "mixed_lengths.py":
            return ["--steps", str(steps), *self.both, *self.mine]
        return ["--turns", str(max(1, steps // 5)), "--block", "5"]


def _grpo(size: str, goal: float, *model: str) -> Work:
    shared = ("--shared-prefix", "true")
    return Work("grpo", "grpo_throughput.py", {"metrics_on": ()}, goal, both=("--size", size, *model), mine=shared)


WORK = {
    "sft": Work(
        "sft", "sft_throughput.py", {"metrics_on": ("moe_metrics_on",), "metrics_off": ("moe_metrics_off",)}, 1.25
    ),
    "dpo": Work("dpo", "dpo_throughput.py", {"metrics_on": ()}, 1.25),
    "grpo": _grpo("32,64,4", 1.4),
    "grpo_long_prompts": _grpo("512,128,8", 2),
    "grpo_real_model": _grpo("55,4,8", 2, "--model", str(REPOSITORY / ".world" / "SmolLM2-135M-Instruct-MoE")),
    "mixed": Work(
        "mixed_grouped",
        "mixed_lengths.py",
        {"packing": ("modes", "packing"), "dynamic": ("modes", "dynamic"), "plain": ("modes", "plain")},
        1.25,
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    result: dict[str, Any] = {
        "name": "trl_race",
        "threads": 1,
        "pairs": options.pairs,
        "steps": options.steps,
        "work": {},
    }
    for name in options.work:
        pairs = [race(WORK[name], options, begins=number % 2) for number in range(options.pairs)]
        result["work"][name] = {
            "goal": WORK[name].goal,
            "ours_to_trl": {
                mode: ratios([(ours[mode], theirs) for ours, theirs in pairs]) for mode in WORK[name].modes
            },
            "peak_gigabytes": {
                side: max((each["peak_gigabytes"] for each in found if "peak_gigabytes" in each), default=None)
                for side, found in zip(("ours", "trl"), zip(*pairs, strict=True), strict=True)
            },
        }
        result["versions"] = pairs[0][1]["versions"] | {"nemo_rl_moe": pairs[0][0]["versions"]["nemo_rl_moe"]}
        print(f"{name}: {json.dumps(result['work'][name])}", file=sys.stderr)
    print(json.dumps(result | {"load_average": round(os.getloadavg()[0], 2)}))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, EXAMPLES)
    others = [name for name in WORK if name != "grpo_real_model"]
    parser.add_argument(
        "--work",
        type=_work,
        default=others,
        help=f"of {','.join(WORK)} (default: all but grpo_real_model, whose model `make real-model` writes)",
    )
    parser.add_argument("--pairs", type=positive, default=4, metavar="N", help="runs of each side (default: 4)")
    parser.add_argument("--steps", type=positive, default=20, metavar="N", help="measured steps of a run (default: 20)")
    parser.add_argument(
        "--trl",
        type=Path,
        default=REPOSITORY / ".venv-trl" / "site",
        metavar="DIR",
        help="Python environment with TRL (default: the one of `make trl`)",
    )
    options = parser.parse_args(arguments)
    if not (options.trl / "trl").is_dir():
        parser.error(
            f"--trl: {options.trl} holds no TRL; `make trl` installs it into {REPOSITORY / '.venv-trl' / 'site'}"
        )
    return options


def _work(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in WORK]:
        raise argparse.ArgumentTypeError(f"got {unknown[0]!r}, expected some of {', '.join(WORK)}")
    return names


def race(work: Work, options: argparse.Namespace, *, begins: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make one run of each side, one after the other, and return our results by mode, and theirs."""
    sides = {
        0: lambda: run("trl_trainers.py", [work.theirs, "--steps", str(options.steps), *work.both], options.trl),
        1: lambda: run(work.ours, work.options(options.steps), None),
    }
    found = {side: sides[side]() for side in (begins, 1 - begins)}
    ours: dict[str, Any] = {name: found[1][name] for name in ("versions", "peak_gigabytes") if name in found[1]}
    for mode, path in work.modes.items():
        values: Any = found[1]
        for key in path:
            values = values[key]
        ours[mode] = values
    return ours, found[0]


def run(script: str, arguments: Sequence[str], trl: Path | None) -> dict[str, Any]:
    """Run a benchmark, and return its printed result."""
    paths = [str(path) for path in (trl, *os.environ.get("PYTHONPATH", "").split(os.pathsep)) if path]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def ratios(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """Return the median and extremes of the pairs' ratios, by wall-clock and CPU time."""
    result = {}
    for clock in ("cpu", "wall"):
        found = [speed(ours, clock) / speed(theirs, clock) for ours, theirs in pairs]
        result[clock] = {
            name: round(of(found), 3) for name, of in (("median", statistics.median), ("least", min), ("most", max))
        }
    return result


def speed(side: Mapping[str, Any], clock: str) -> float:
    """Return the tokens per second."""
    if "generated_tokens_per_step" in side:
        seconds = side["cpu_seconds_per_step"] if clock == "cpu" else side["seconds_per_step"]["median"]
        return float(side["generated_tokens_per_step"]) / float(seconds)
    found = side["tokens_per_cpu_second" if clock == "cpu" else "tokens_per_second"]
    return float(found["median"] if isinstance(found, Mapping) else found)


if __name__ == "__main__":
    main()
