# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Results of the demo with a tool: answers and calls for hard and easy questions."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from examples.studies.intervals import interval
from examples.tools_demo.data import needs_tool
from nemo_rl_moe.errors import DataError
from nemo_rl_moe.runs.folder.saved_samples import SAMPLES_FILE_NAME

METHODS = {"tool": "with the calculator", "no_tool": "control: without it", "coin": "control: a coin as reward"}
"""Kinds of runs, with their labels."""
MEASURES = ("right", "hard right", "easy right", "hard called", "hard asked whole", "easy called")
_EXPRESSION = re.compile(r'"expression": "([^"]*)"')


@dataclass(frozen=True)
class Run:
    """One run of reinforcement learning."""

    method: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method}-{self.seed}"


Validation = Mapping[str, float]
"""Shares of responses by `MEASURES`: of right responses, and for each kind of question of right responses, of responses
with a call, and of responses whose first call has the full question."""


def validations(run_folder: Path) -> dict[int, Validation]:
    """Return the shares in each validation of a run, by step.

    Raises:
        DataError: There is no validation, or the file is damaged.
    """
    path = run_folder / SAMPLES_FILE_NAME
    found: dict[int, list[tuple[bool, ...]]] = {}
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                sample = json.loads(line)
                if sample["split"] == "val":
                    found.setdefault(sample["step"], []).append(_facts(sample))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: no samples of a run of this demo: {error}") from None
    if not found:
        raise DataError(f"{path}: no validation")
    return {step: _shares(np.array(facts)) for step, facts in sorted(found.items())}


def _facts(sample: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return whether the question is hard, and the response is right, has a call, and calls with the full question."""
    called = sample.get("num_turns", 1) > 1
    asked = _EXPRESSION.search(sample["response"])
    whole = called and asked is not None and f"{asked[1]}=" == sample["prompt"]
    return needs_tool(sample["prompt"]), sample["is_correct"], called, whole


def _shares(facts: np.ndarray) -> Validation:
    is_hard, is_right, called, whole = facts.T
    kinds = {"hard": is_hard, "easy": ~is_hard}
    return {
        "right": float(is_right.mean()),
        **{f"{name} right": float(is_right[kind].mean()) for name, kind in kinds.items() if kind.any()},
        **{f"{name} called": float(called[kind].mean()) for name, kind in kinds.items() if kind.any()},
        **({"hard asked whole": float(whole[is_hard].mean())} if is_hard.any() else {}),
    }


def table(results: Mapping[Run, Mapping[int, Validation]]) -> str:
    """Return a Markdown table of the first and the last validation of each run, with means over seeds."""
    lines = [
        "| run | seed | right | hard ones right | easy ones right | calls at hard ones | of the whole question |"
        " calls at easy ones |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for method, words in METHODS.items():
        of_method = {run: found for run, found in results.items() if run.method == method}
        for run, found in sorted(of_method.items(), key=lambda item: item[0].seed):
            first, last = found[min(found)], found[max(found)]
            cells = [_change(first, last, measure) for measure in MEASURES]
            lines.append(f"| {words} | {run.seed} | {' | '.join(cells)} |")
        if len(of_method) > 1:
            lines.append(f"| {words} | mean of {len(of_method)} | {' | '.join(_means(list(of_method.values())))} |")
    return "\n".join(lines)


def _change(first: Validation, last: Validation, measure: str) -> str:
    return f"{first[measure]:.2f} to {last[measure]:.2f}" if measure in first and measure in last else "-"


def _means(runs: Sequence[Mapping[int, Validation]]) -> list[str]:
    """Return the mean of each measure after training, with its 95% interval over seeds."""
    cells = []
    for measure in MEASURES:
        found = interval([of_run[max(of_run)][measure] for of_run in runs if measure in of_run[max(of_run)]])
        cells.append(
            "-" if found is None else f"{found.mean:.2f} ({max(found.low, 0):.2f} to {min(found.high, 1):.2f})"
        )
    return cells
