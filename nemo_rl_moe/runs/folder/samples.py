# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Writer of `samples.jsonl`, which has the trajectories that a run saves.

A line has the step, the split, the texts of prompt and response, and reward and correctness. It has `conversation` and
`times` (see `conversations.py`) if there is more than a prompt and a response, `left_out` if the trajectory is not
trained on, and `thumbnails` if it has images.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from nemo_rl_moe.runs.folder.conversations import (
    ConversationTurn,
    RolloutTimes,
    conversation_json,
    says_more,
    times_json,
    trained,
)
from nemo_rl_moe.runs.folder.lines import LineFile
from nemo_rl_moe.runs.folder.sample_text import LEGEND, Line, ShownSample, sample_lines
from nemo_rl_moe.runs.folder.saved_samples import PROMPTS_OF_A_STEP, SAMPLES_FILE_NAME, has_images, shown_sample
from nemo_rl_moe.runs.folder.thumbnails import SavedImage, ThumbnailWriter

_FURTHER_FAILURES = 8


class SavedTrajectory(Protocol):
    """The part of `rollouts.trajectory.Trajectory` that is logged."""

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
    def conversation(self) -> Sequence[ConversationTurn]: ...
    @property
    def times(self) -> RolloutTimes | None: ...
    @property
    def left_out(self) -> str: ...
    @property
    def environment(self) -> str: ...


class Console(Protocol):
    """The part of `loggers.console.ConsoleLogger` that is used here."""

    def message(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...
    def show(self, lines: Sequence[Line]) -> None: ...


class SampleLog:
    """Writer of `samples.jsonl` and its thumbnails. It also prints responses of validations.

    Only responses that `read_samples` may choose for a report have thumbnails of their images: the first response to
    each of the first prompts, in validations and in training steps for which `has_images` is true. The first prompts
    are the same in every validation.
    """

    def __init__(self, run_folder: Path, console: Console, num_to_print: int, num_to_save: int | None):
        self._lines = LineFile(run_folder / SAMPLES_FILE_NAME, console.warn, console.message)
        self._thumbnails = ThumbnailWriter(run_folder, console.warn)
        self._console = console
        self._num_to_print, self._num_to_save = num_to_print, num_to_save
        self._has_explained = False

    def __enter__(self) -> "SampleLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.close()

    def write(self, step: int, split: str, trajectories: Sequence[SavedTrajectory]) -> None:
        """Write the trajectories of a step. Requires that trajectories of one prompt follow each other."""
        kept = [*trajectories[: self._num_to_save], *self._further_failures(trajectories)]
        shown = _one_of_each_prompt(kept)[:PROMPTS_OF_A_STEP] if split == "val" or has_images(step) else []
        names = {id(trajectory): self._thumbnails.write(trajectory.images) for trajectory in shown}
        self._lines.append(
            json.dumps(_record(step, split, trajectory, names.get(id(trajectory), []))) for trajectory in kept
        )
        if split == "val":
            self._print(self.shown(step, split, trajectories))

    def shown(self, step: int, split: str, trajectories: Sequence[SavedTrajectory]) -> list[ShownSample]:
        """Return the samples to display: the first response to each of the first prompts."""
        chosen = _one_of_each_prompt(trajectories)[: self._num_to_print]
        return [shown_sample(_record(step, split, trajectory, ())) for trajectory in chosen]

    def _print(self, samples: Sequence[ShownSample]) -> None:
        if not self._has_explained and any(sample.turns for sample in samples):
            self._has_explained = True
            self._console.message(f"  conversations: {LEGEND}")
        for sample in samples:
            self._console.show(sample_lines(sample))

    def _further_failures(self, trajectories: Sequence[SavedTrajectory]) -> list[SavedTrajectory]:
        """Return a few trajectories without a score from beyond the first `num_to_save`."""
        if not self._num_to_save:
            return []
        return [found for found in trajectories[self._num_to_save :] if found.fault is not None][:_FURTHER_FAILURES]


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
    if trajectory.left_out:
        seldom["left_out"] = trajectory.left_out
    if says_more(trajectory.conversation):
        is_trained = split == "train" and not trajectory.left_out
        turns = trained(trajectory.conversation) if is_trained else trajectory.conversation
        seldom["conversation"] = conversation_json(turns)
        if trajectory.times is not None:
            seldom["times"] = times_json(trajectory.times)
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
