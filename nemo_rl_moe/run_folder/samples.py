# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`samples.jsonl`: the trajectories that a run keeps, written and read."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int, Shaped

from nemo_rl_moe.run_folder.lines import LineFile
from nemo_rl_moe.run_folder.run_data import Series

SAMPLES_FILE_NAME = "samples.jsonl"
_LONGEST_PRINTED = 400


class SavedTrajectory(Protocol):
    """The part of a trajectory that is kept; `rollouts.trajectory.Trajectory` is one."""

    @property
    def sample_id(self) -> str: ...
    @property
    def prompt_text(self) -> str: ...
    @property
    def response_text(self) -> str: ...
    @property
    def num_sampled_tokens(self) -> int: ...
    @property
    def num_turns(self) -> int: ...
    @property
    def is_truncated(self) -> bool: ...
    @property
    def is_correct(self) -> bool: ...
    @property
    def reward(self) -> float: ...
    @property
    def fault(self) -> Any: ...
    @property
    def fault_message(self) -> str: ...
    @property
    def weight_version(self) -> int: ...


class Console(Protocol):
    """Where lines for the user are shown; `loggers.console.ConsoleLogger` is one."""

    def message(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...


class SampleLog:
    """Writes `samples.jsonl` and prints responses of validations.

    What a full disk does not take is kept and written later, as `LineFile` says; responses are printed all the same.

    The same prompts come first in every validation, so that a reader sees how the answers to them change.

    Args:
        run_folder: An existing folder.
        console: Where responses are printed.
        num_to_print: How many of each validation.
        num_to_save: How many of each step and each validation; None: all.
    """

    def __init__(self, run_folder: Path, console: Console, num_to_print: int, num_to_save: int | None):
        self._lines = LineFile(run_folder / SAMPLES_FILE_NAME, console.warn, console.message)
        self._console = console
        self._num_to_print, self._num_to_save = num_to_print, num_to_save

    def __enter__(self) -> "SampleLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.close()

    def write(self, step: int, split: str, trajectories: Sequence[SavedTrajectory]) -> None:
        """Takes the trajectories of a step.

        Args:
            step: Steps done.
            split: `train` or `val`.
            trajectories: As many for each prompt, one prompt after the other.
        """
        kept = trajectories[: self._num_to_save]
        self._lines.append(json.dumps(_record(step, split, trajectory)) for trajectory in kept)
        if split == "val":
            for trajectory in _one_of_each_prompt(trajectories)[: self._num_to_print]:
                self._console.message(_shown(trajectory))


def _one_of_each_prompt(trajectories: Sequence[SavedTrajectory]) -> list[SavedTrajectory]:
    first: dict[str, SavedTrajectory] = {}
    for trajectory in trajectories:
        first.setdefault(trajectory.sample_id, trajectory)
    return list(first.values())


def _record(step: int, split: str, trajectory: SavedTrajectory) -> dict[str, Any]:
    fault = trajectory.fault
    return {
        "step": step,
        "split": split,
        "sample_id": trajectory.sample_id,
        "prompt": trajectory.prompt_text,
        "response": trajectory.response_text,
        "num_tokens": trajectory.num_sampled_tokens,
        "is_truncated": trajectory.is_truncated,
        "reward": trajectory.reward,
        "is_correct": trajectory.is_correct,
        "fault": None if fault is None else f"{fault.value}: {trajectory.fault_message}",
        "weight_version": trajectory.weight_version,
    } | ({"num_turns": trajectory.num_turns} if trajectory.num_turns > 1 else {})


def _shown(trajectory: SavedTrajectory) -> str:
    """One line: `  right   228+378=  ->  <think></think>606`."""
    verdict = "right" if trajectory.is_correct else "cut off" if trajectory.is_truncated else "wrong"
    return f"  {verdict:8}{_on_one_line(trajectory.prompt_text)}  ->  {_on_one_line(trajectory.response_text)}"


def _on_one_line(text: str) -> str:
    one_line = text.replace("\n", "\\n")
    return one_line if len(one_line) <= _LONGEST_PRINTED else f"{one_line[:_LONGEST_PRINTED]} [...]"


_CUT = " [...]"
STEPS_OF_A_SPLIT, PROMPTS_OF_A_STEP, LONGEST_TEXT = 4, 6, 2000


def read_samples(folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Responses to the first prompts of some steps of training and of validation, evenly spaced, the last one always.

    Validation comes first: its prompts are the same ones each time.

    A last line without its end, which a crash can leave, is passed over.

    Args:
        folder: The run's folder.
        notes: Told of lines that cannot be read.
    """
    path = folder / SAMPLES_FILE_NAME
    if not path.is_file():
        return []
    found: dict[str, dict[int, dict[str, dict[str, Any]]]] = {}
    num_bad = 0
    with path.open("rb") as lines:
        for line in lines:
            sample = _parse(line)
            if sample is None:
                num_bad += line.endswith(b"\n") and bool(line.strip())
                continue
            of_step = found.setdefault(sample["split"], {}).setdefault(sample["step"], {})
            if len(of_step) < PROMPTS_OF_A_STEP:
                of_step.setdefault(sample["sample_id"], sample)
    if num_bad:
        notes.append(f"{path}: lines that are no samples: {num_bad}")
    chosen = []
    for _, steps in sorted(found.items(), reverse=True):
        in_order = sorted(steps)
        for position in evenly_spaced(len(in_order), STEPS_OF_A_SPLIT).tolist():
            chosen += list(steps[in_order[position]].values())
    return chosen


def shortened(samples: Sequence[dict[str, Any]], length: int) -> list[dict[str, Any]]:
    """The same with at most so many characters of each text."""
    return [
        {name: _short(value, length) if isinstance(value, str) else value for name, value in sample.items()}
        for sample in samples
    ]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
        reward = record.get("reward")
        return {
            "step": int(record["step"]),
            "split": _short(record["split"]),
            "sample_id": _short(record["sample_id"]),
            "prompt": _short(record["prompt"]),
            "response": _short(record["response"]),
            "reward": f"{float(reward):.4g}" if reward is not None and not math.isnan(float(reward)) else "",
            "verdict": _verdict(record),
        }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _verdict(record: dict[str, Any]) -> str:
    if record.get("fault"):
        return str(record["fault"])[:LONGEST_TEXT]
    return "right" if record.get("is_correct") else "cut off" if record.get("is_truncated") else "wrong"


def _short(text: Any, length: int = LONGEST_TEXT) -> str:
    words = str(text)
    return words if len(words) <= length else f"{words[:length].removesuffix(_CUT)}{_CUT}"


def evenly_spaced(number: int, most: int) -> Int[np.ndarray, " chosen"]:
    """At most `most` of the positions 0 to `number` - 1, as evenly spaced as can be; the last one always."""
    chosen = min(number, max(most, 1))
    return np.ceil(np.arange(1, chosen + 1) * number / max(chosen, 1)).astype(np.int64) - 1


def thinned(series: Series, most: int) -> Series:
    """At most `most` points of a series, all of them real ones.

    Of each stretch of steps, those with the lowest and the highest value, and one that is NaN or infinite where there
    is one; and the last point. A spike of one step is kept so.
    """
    number = len(series.steps)
    if number <= most:
        return series
    # All but the last point, in stretches of equal width; what is missing of the last stretch is a copy of its end.
    num_stretches = max((most - 1) // 3, 1)
    width = -(-(number - 1) // num_stretches)
    positions = np.minimum(np.arange(-(-(number - 1) // width) * width), number - 2).reshape(-1, width)
    values = series.values[positions]
    is_finite = np.isfinite(values)
    lowest, highest = np.where(is_finite, values, np.inf).argmin(1), np.where(is_finite, values, -np.inf).argmax(1)
    rows, with_gap = np.arange(len(positions)), ~is_finite.all(1)
    chosen = [positions[rows, lowest], positions[rows, highest], positions[rows, (~is_finite).argmax(1)][with_gap]]
    kept = np.unique(np.concatenate([*chosen, [number - 1]]))
    return Series(series.steps[kept], series.values[kept])


def highest_of_stretches(
    values: Shaped[np.ndarray, "steps places"], most: int
) -> tuple[Int[np.ndarray, " stretches"], Shaped[np.ndarray, "stretches places"]]:
    """At most `most` rows: the position of each stretch's last row, and the highest value at each place."""
    last = evenly_spaced(len(values), most)
    first = np.concatenate([[0], last[:-1] + 1])
    return last, np.maximum.reduceat(values, first, axis=0)
