# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`samples.jsonl`: the trajectories that a run keeps, written and read; each names the thumbnails of its images."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from nemo_rl_moe.runs.folder.lines import LineFile
from nemo_rl_moe.runs.folder.thumbnails import IMAGES_OF_A_SAMPLE, SavedImage, ThumbnailWriter, is_thumbnail_name
from nemo_rl_moe.shapes import Int

SAMPLES_FILE_NAME = "samples.jsonl"
_LONGEST_PRINTED = 400
_FURTHER_FAILURES = 8


class SavedTrajectory(Protocol):
    """Part of a trajectory that is logged; `rollouts.trajectory.Trajectory` is one."""

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
    def num_sequences(self) -> int: ...
    @property
    def is_truncated(self) -> bool: ...
    @property
    def is_correct(self) -> bool: ...
    @property
    def reward(self) -> float: ...
    @property
    def rewards(self) -> Mapping[str, float]: ...
    @property
    def fault(self) -> Any: ...
    @property
    def fault_message(self) -> str: ...
    @property
    def weight_version(self) -> int: ...
    @property
    def images(self) -> Sequence[SavedImage]: ...
    @property
    def environment(self) -> str: ...


class Console(Protocol):
    """Console that shows lines to the user; `loggers.console.ConsoleLogger` is one."""

    def message(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...


class SampleLog:
    """Writer of `samples.jsonl` and its thumbnails, which also prints responses of validations.

    The same prompts come first in every validation. Thumbnails are of responses that `read_samples` may choose: the
    first ones to the first prompts, of all validations and of `has_images` steps.
    """

    def __init__(self, run_folder: Path, console: Console, num_to_print: int, num_to_save: int | None):
        self._lines = LineFile(run_folder / SAMPLES_FILE_NAME, console.warn, console.message)
        self._thumbnails = ThumbnailWriter(run_folder, console.warn)
        self._console = console
        self._num_to_print, self._num_to_save = num_to_print, num_to_save

    def __enter__(self) -> "SampleLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.close()

    def write(self, step: int, split: str, trajectories: Sequence[SavedTrajectory]) -> None:
        """Write the trajectories of a step.

        Args:
            trajectories: As many for each prompt, one prompt after the other.
        """
        kept = [*trajectories[: self._num_to_save], *self._further_failures(trajectories)]
        shown = _one_of_each_prompt(kept)[:PROMPTS_OF_A_STEP] if split == "val" or has_images(step) else []
        names = {id(trajectory): self._thumbnails.write(trajectory.images) for trajectory in shown}
        self._lines.append(
            json.dumps(_record(step, split, trajectory, names.get(id(trajectory), []))) for trajectory in kept
        )
        if split == "val":
            for trajectory in _one_of_each_prompt(trajectories)[: self._num_to_print]:
                self._console.message(_shown(trajectory))

    def _further_failures(self, trajectories: Sequence[SavedTrajectory]) -> list[SavedTrajectory]:
        """Return a few of the failed ones that are not among the first."""
        if self._num_to_save is None or self._num_to_save == 0:
            return []
        return [found for found in trajectories[self._num_to_save :] if found.fault is not None][:_FURTHER_FAILURES]


def has_images(step: int) -> bool:
    """Return whether a training step keeps images: all below 20, each tenth below 200, hundredth below 2000."""
    return step % 10 ** (len(str(step // 2)) - 1) == 0


def _one_of_each_prompt(trajectories: Sequence[SavedTrajectory]) -> list[SavedTrajectory]:
    first: dict[str, SavedTrajectory] = {}
    for trajectory in trajectories:
        first.setdefault(trajectory.sample_id, trajectory)
    return list(first.values())


def _record(step: int, split: str, trajectory: SavedTrajectory, thumbnails: Sequence[str]) -> dict[str, Any]:
    fault = trajectory.fault
    seldom: dict[str, Any] = {"num_turns": trajectory.num_turns} if trajectory.num_turns > 1 else {}
    if trajectory.num_sequences > 1:
        seldom["num_sequences"] = trajectory.num_sequences
    if trajectory.environment:
        seldom["environment"] = trajectory.environment
    if thumbnails:
        seldom["thumbnails"] = list(thumbnails)
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
    } | ({**seldom, "rewards": dict(trajectory.rewards)} if trajectory.rewards else seldom)


def _shown(trajectory: SavedTrajectory) -> str:
    """Return one line: `  right      228+378=  ->  <think></think>606`."""
    verdict = "right" if trajectory.is_correct else "truncated" if trajectory.is_truncated else "wrong"
    if trajectory.fault is not None:
        verdict = "failed"
    return f"  {verdict:11}{_on_one_line(trajectory.prompt_text)}  ->  {_on_one_line(trajectory.response_text)}"


def _on_one_line(text: str) -> str:
    one_line = text.replace("\n", "\\n")
    return one_line if len(one_line) <= _LONGEST_PRINTED else f"{one_line[:_LONGEST_PRINTED]} [...]"


_CUT = " [...]"
STEPS_OF_A_SPLIT, PROMPTS_OF_A_STEP, LONGEST_TEXT = 4, 6, 2000


def read_samples(folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Return responses to the first prompts of four evenly spaced steps of training and of validation."""
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
        for step in _shown_steps(steps):
            chosen += list(steps[step].values())
    return chosen


def _shown_steps(steps: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> list[int]:
    """Select evenly spaced steps of a split, and the last one; with images, the nearest steps that have some."""
    in_order = sorted(steps)
    *earlier, last = (in_order[position] for position in evenly_spaced(len(in_order), STEPS_OF_A_SPLIT).tolist())
    with_images = [step for step in in_order if any("thumbnails" in sample for sample in steps[step].values())]
    if with_images:
        earlier = [min(with_images, key=lambda other, step=step: abs(other - step)) for step in earlier]  # type: ignore[misc]
    return sorted({*earlier, last})


def named_thumbnails(path: Path) -> set[str]:
    """Return the names of all thumbnails in a file of samples; none where there is no such file."""
    if not path.is_file():
        return set()
    with path.open("rb") as lines:
        # Most lines have none, and need no parsing.
        return {name for line in lines if b'"thumbnails"' in line for name in _thumbnails(_record_in(line))}


def shortened(samples: Sequence[dict[str, Any]], length: int) -> list[dict[str, Any]]:
    """Return the samples with at most `length` characters of each text."""
    return [
        {name: _short(value, length) if isinstance(value, str) else value for name, value in sample.items()}
        for sample in samples
    ]


def _record_in(line: bytes) -> Any:
    """Read the record of a line; empty where it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return {}


def _thumbnails(record: Any) -> list[str]:
    """Return the names of a record that may have been edited: no other text of a file becomes part of a path."""
    names = record.get("thumbnails") if isinstance(record, dict) else None
    return [name for name in names[:IMAGES_OF_A_SAMPLE] if is_thumbnail_name(name)] if isinstance(names, list) else []


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
        reward = record.get("reward")
        thumbnails = _thumbnails(record)
        return {
            "step": int(record["step"]),
            "split": _short(record["split"]),
            "sample_id": _short(record["sample_id"]),
            "prompt": _short(record["prompt"]),
            "response": _short(record["response"]),
            "reward": f"{float(reward):.4g}" if reward is not None and not math.isnan(float(reward)) else "",
            "verdict": _verdict(record),
        } | ({"thumbnails": thumbnails} if thumbnails else {})
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return None


def _verdict(record: dict[str, Any]) -> str:
    if record.get("fault"):
        return str(record["fault"])[:LONGEST_TEXT]
    return "right" if record.get("is_correct") else "truncated" if record.get("is_truncated") else "wrong"


def _short(text: Any, length: int = LONGEST_TEXT) -> str:
    words = str(text)
    return words if len(words) <= length else f"{words[:length].removesuffix(_CUT)}{_CUT}"


def evenly_spaced(number: int, most: int) -> Int[np.ndarray, " chosen"]:
    """Select at most `most` of the positions 0 to `number` - 1, evenly spaced; the last one always."""
    chosen = min(number, max(most, 1))
    return np.ceil(np.arange(1, chosen + 1) * number / max(chosen, 1)).astype(np.int64) - 1
