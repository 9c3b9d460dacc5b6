# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Results of the demo with a released model: answers to held-out words, before and after training."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from examples.studies.intervals import interval
from nemo_rl_moe.errors import DataError
from nemo_rl_moe.runs.folder.folder import newest_run_folders
from nemo_rl_moe.runs.folder.saved_samples import SAMPLES_FILE_NAME

_NUM_SHOWN = 5


@dataclass(frozen=True)
class Answer:
    """A response to a held-out word."""

    word: str
    text: str
    is_right: bool


@dataclass(frozen=True)
class Run:
    """The folder of a run of reinforcement learning, and the answers in its first and last validation."""

    folder: Path
    before: list[Answer]
    after: list[Answer]


def read_run(logs: Path) -> Run:
    """Read the last run of a folder of logs.

    Raises:
        DataError: There is no run, it has no validations, or its file is damaged.
    """
    folder = (newest_run_folders(logs) or [logs])[0]
    path = folder / SAMPLES_FILE_NAME
    validations: dict[int, list[Answer]] = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            sample = json.loads(line)
            if sample["split"] == "val":
                word = sample["prompt"].split()[-1]
                answer = Answer(word, sample["response"], sample["is_correct"])
                validations.setdefault(sample["step"], []).append(answer)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: no samples of a run of this demo: {error}") from None
    if not validations:
        raise DataError(f"{path}: no validation")
    return Run(folder, validations[min(validations)], validations[max(validations)])


def accuracy(answers: list[Answer]) -> float:
    """Return the share of right answers."""
    return sum(answer.is_right for answer in answers) / len(answers)


def table(runs: Mapping[int, Run]) -> str:
    """Return a Markdown table of the accuracies by seed, and for several seeds the mean gain with its 95% interval."""
    lines = ["| seed | before | after | gain |", "|---|---:|---:|---:|"]
    gains = []
    for seed, run in sorted(runs.items()):
        before, after = accuracy(run.before), accuracy(run.after)
        gains.append(after - before)
        lines.append(f"| {seed} | {before:.3f} | {after:.3f} | {after - before:+.3f} |")
    if found := interval(gains):
        lines.append(f"| mean of {found.count} | | | {found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f}) |")
    return "\n".join(lines)


def responses(run: Run) -> str:
    """Return lines with the first response to each of five held-out words, before and after training."""
    before = {answer.word: answer for answer in reversed(run.before)}
    after = {answer.word: answer for answer in reversed(run.after)}
    words = list(dict.fromkeys(answer.word for answer in run.after))
    shown = words[:: max(1, len(words) // _NUM_SHOWN)][:_NUM_SHOWN]
    width = max(map(len, shown))
    return "\n".join(f"  {word:{width}}  {_shown(before[word])}  ->  {_shown(after[word])}" for word in shown)


def _shown(answer: Answer) -> str:
    return f"{answer.text!r} ({'right' if answer.is_right else 'wrong'})"
