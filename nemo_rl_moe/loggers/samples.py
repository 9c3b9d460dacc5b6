# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Responses as text: some on the console, more in the run's folder."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from nemo_rl_moe.loggers.console import ConsoleLogger
from nemo_rl_moe.loggers.line_file import LineFile

SAMPLES_FILE_NAME = "samples.jsonl"
_LONGEST_PRINTED = 400


class ScoredResponse(Protocol):
    """What is shown of a response; `algorithms.rollouts.Rollout` is one."""

    @property
    def prompt(self) -> Any: ...
    @property
    def response(self) -> Any: ...
    @property
    def text(self) -> str: ...
    @property
    def score(self) -> Any: ...


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

    def __init__(self, run_folder: Path, console: ConsoleLogger, num_to_print: int, num_to_save: int | None):
        self._lines = LineFile(run_folder / SAMPLES_FILE_NAME, console.warn, console.message)
        self._console = console
        self._num_to_print, self._num_to_save = num_to_print, num_to_save

    def __enter__(self) -> "SampleLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.close()

    def write(self, step: int, split: str, rollouts: Sequence[ScoredResponse]) -> None:
        """Takes the responses of a step.

        Args:
            step: Steps done.
            split: `train` or `val`.
            rollouts: As many for each prompt, one prompt after the other.
        """
        self._lines.append(json.dumps(_record(step, split, rollout)) for rollout in rollouts[: self._num_to_save])
        if split == "val":
            for rollout in _one_of_each_prompt(rollouts)[: self._num_to_print]:
                self._console.message(_shown(rollout))


def _one_of_each_prompt(rollouts: Sequence[ScoredResponse]) -> list[ScoredResponse]:
    first: dict[str, ScoredResponse] = {}
    for rollout in rollouts:
        first.setdefault(rollout.prompt.sample_id, rollout)
    return list(first.values())


def _record(step: int, split: str, rollout: ScoredResponse) -> dict[str, Any]:
    fault = rollout.score.fault
    return {
        "step": step,
        "split": split,
        "sample_id": rollout.prompt.sample_id,
        "prompt": rollout.prompt.text,
        "response": rollout.text,
        "num_tokens": len(rollout.response.token_ids),
        "is_truncated": rollout.response.is_truncated,
        "reward": rollout.score.reward,
        "is_correct": rollout.score.is_correct,
        "fault": None if fault is None else f"{fault.value}: {rollout.score.message}",
        "weight_version": rollout.response.weight_version,
    }


def _shown(rollout: ScoredResponse) -> str:
    """One line: `  right   228+378=  ->  <think></think>606`."""
    verdict = "right" if rollout.score.is_correct else "cut off" if rollout.response.is_truncated else "wrong"
    return f"  {verdict:8}{_short(rollout.prompt.text)}  ->  {_short(rollout.text)}"


def _short(text: str) -> str:
    one_line = text.replace("\n", "\\n")
    return one_line if len(one_line) <= _LONGEST_PRINTED else f"{one_line[:_LONGEST_PRINTED]} [...]"
