# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Detection of permuted or exchanged expert ids in one layer, over many seeds. Prints one table.

A run is the demo's GRPO with two pipeline stages and full recomputation. A seed selects the layer and the ids, and the
fault begins at the first step. A step, or a live run, counts as found if permuted expert ids are the only report. The
fault is planted into files of healthy runs, which `nemo-rl-moe audit` reads step by step, and into the workers of live
runs, which report a lasting cause once.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from capture_faults import audit, plant
from planted_faults import IN_BFLOAT16, MOST_SEEDS
from routing_faults import FINE_TUNED, Scene, capture_of, report_error
from small_model import make_parser, positive, running_ray

EXAMPLES = """\
examples:
  python benchmarks/permuted_ids.py                        5 seeds in files, 3 in live runs
  python benchmarks/permuted_ids.py --live-seeds 0         files alone"""
KINDS = ("permuted", "exchanged")
FOUND = "captured expert ids are a permutation of the router's"
IN_FLOAT32 = tuple(setting.replace("bfloat16", "float32") for setting in IN_BFLOAT16)
FOUR_UPDATES = (
    *IN_BFLOAT16,
    "policy.train_global_batch_size=16",
    "policy.train_micro_batch_size=8",
    "policy.megatron_cfg.optimizer.lr=3e-4",
)
RUNS = {"bfloat16": IN_BFLOAT16, "float32": IN_FLOAT32, "bfloat16, four updates a step": FOUR_UPDATES}
LIVE_RUNS = ("bfloat16", "float32")


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        where: `files` or `live`.
        settings: Key of `RUNS`.
        kind: One of `KINDS`, or `healthy`.
        num_cases: Steps of files, or live runs, with the fault (for `healthy`, without one).
        num_found: Cases with only permuted ids in the report (for `healthy`, with any report).
    """

    where: str
    settings: str
    kind: str
    num_cases: int
    num_found: int


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="permuted_ids_") as name, running_ray(num_cpus=4):
        scene = Scene(Path(name), options.model)
        for settings in RUNS:
            rows += of_files(scene, settings, options.runs, options.steps, options.seeds)
            if settings in LIVE_RUNS:
                rows += [of_live_runs(scene, settings, kind, options.live_seeds) for kind in KINDS]
    rows = [row for row in rows if row.num_cases]
    print(table(rows))
    if options.output is not None:
        options.output.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, EXAMPLES)
    seeds = range(MOST_SEEDS + 1)
    parser.add_argument("--runs", type=positive, default=2, metavar="N", help="recorded healthy runs (2)")
    parser.add_argument("--steps", type=positive, default=8, metavar="N", help="steps of each (8)")
    parser.add_argument("--seeds", type=int, choices=seeds, default=5, metavar="N", help="faults in files (5)")
    parser.add_argument("--live-seeds", type=int, choices=seeds, default=3, metavar="N", help="faults in runs (3)")
    parser.add_argument("--model", type=Path, help=f"fine-tuned model (default: {FINE_TUNED}, else one is made)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the same as JSON")
    return parser.parse_args(arguments)


def of_files(scene: Scene, settings: str, num_runs: int, num_steps: int, num_seeds: int) -> list[Row]:
    """Plant faults into the files of healthy runs, and audit them with and without."""
    found = dict.fromkeys((*KINDS, "healthy"), 0)
    for run in range(num_runs):
        capture = capture_of(scene, None, 1, num_steps, (*RUNS[settings], f"grpo.seed={100 + run}"))
        found["healthy"] += sum(bool(texts) for texts in findings_of_steps(capture))
        for kind in KINDS:
            for seed in range(num_seeds):
                folder = scene.folder / f"{kind}_{seed}_of_{capture.parents[2].name}"
                plant(capture, f"{kind}_{seed}", 1, folder)
                found[kind] += sum(is_found(texts) for texts in findings_of_steps(folder))
    report_error(f"files, {settings}: {found}")
    faulty = num_runs * num_steps * num_seeds
    steps = dict.fromkeys(KINDS, faulty) | {"healthy": num_runs * num_steps}
    return [Row("files", settings, kind, steps[kind], found[kind]) for kind in found]


def of_live_runs(scene: Scene, settings: str, kind: str, num_seeds: int, num_steps: int = 3) -> Row:
    """Run with a fault for each seed, and count the runs that only report permuted ids, at the first step."""
    overrides = (*RUNS[settings], "policy.megatron_cfg.routing_replay_on_anomaly=warn")
    num_found = 0
    for seed in range(num_seeds):
        ran = scene.run(f"{kind}_{seed}", 1, num_steps, overrides)
        texts = [text for _, text in ran.alarms]
        num_found += is_found(texts) and ran.alarms[0][0] == 1  # a lasting cause is reported once
        report_error(f"live, {settings}, {kind}, seed {seed}: {texts}")
    return Row("live runs", settings, kind, num_seeds, num_found)


def findings_of_steps(capture: Path) -> list[list[str]]:
    """Return the findings of each step of a capture by `nemo-rl-moe audit`."""
    return [step["findings"] for step in audit(capture)["steps"]]


def is_found(texts: Sequence[str]) -> bool:
    """Return whether permuted ids are the only report on a step."""
    return bool(texts) and all(FOUND in text for text in texts)


def table(rows: Sequence[Row]) -> str:
    """Return the table as Markdown."""
    lines = ["| where | settings | fault | steps or runs | found |", "|---|---|---|---|---|"]
    lines += [f"| {row.where} | {row.settings} | {row.kind} | {row.num_cases} | {row.num_found} |" for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
