# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Reader of `samples.jsonl`, for the report and for the terminal view of a running run."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rl_moe.runs.folder.conversations import (
    FAILED_OUTCOMES,
    ConversationTurn,
    RolloutTimes,
    conversation_of,
    times_json,
    times_of,
)
from nemo_rl_moe.runs.folder.line_tail import NO_RECORD
from nemo_rl_moe.runs.folder.sample_text import ShownSample, conversation_summary
from nemo_rl_moe.runs.folder.thumbnails import IMAGES_OF_A_SAMPLE, is_thumbnail_name
from nemo_rl_moe.shapes import Int

SAMPLES_FILE_NAME = "samples.jsonl"
MOST_TURNS = 40
"""Largest number of turns of a conversation in a report."""
_CUT = " [...]"
_LEFT_OUT = ""
_LOOKED_AT = 1 << 20
STEPS_OF_A_SPLIT, PROMPTS_OF_A_STEP, LONGEST_TEXT = 4, 6, 2000


def read_samples(folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Return responses to the first prompts, of evenly spaced steps of training and of validation."""
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
            if len(of_step) - (_LEFT_OUT in of_step) < PROMPTS_OF_A_STEP and sample["sample_id"] not in of_step:
                of_step[sample["sample_id"]] = sample
            elif "left_out" in sample:
                of_step.setdefault(_LEFT_OUT, sample)
    if num_bad:
        notes.append(f"{path}: lines that are no samples: {num_bad}")
    chosen = []
    for _, steps in sorted(found.items(), reverse=True):
        for step in _shown_steps(steps):
            chosen += list(steps[step].values())
    return chosen


def _shown_steps(steps: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> list[int]:
    """Return evenly spaced steps and the last step. If samples have images, prefer steps with images."""
    in_order = sorted(steps)
    *earlier, last = (in_order[position] for position in evenly_spaced(len(in_order), STEPS_OF_A_SPLIT).tolist())
    with_images = [step for step in in_order if any("thumbnails" in sample for sample in steps[step].values())]
    if with_images:
        earlier = [min(with_images, key=lambda other, step=step: abs(other - step)) for step in earlier]  # type: ignore[misc]
    return sorted({*earlier, last})


def named_thumbnails(path: Path) -> set[str]:
    """Return the names of all thumbnails in a file of samples, if it exists."""
    if not path.is_file():
        return set()
    with path.open("rb") as lines:
        # Most lines have no thumbnails, and need no parsing.
        return {name for line in lines if b'"thumbnails"' in line for name in _thumbnails(_record_in(line))}


def shortened(samples: Sequence[dict[str, Any]], length: int) -> list[dict[str, Any]]:
    """Return the samples with at most `length` characters of each text."""
    return [{name: _shortened_value(name, value, length) for name, value in sample.items()} for sample in samples]


def _shortened_value(name: str, value: Any, length: int) -> Any:
    if name == "conversation":
        return {**value, "turns": [_shortened_turn(turn, length) for turn in value["turns"]]}
    return _short(value, length) if isinstance(value, str) else value


def _shortened_turn(turn: Mapping[str, Any], length: int) -> dict[str, Any]:
    calls = [{**call, "arguments": _short(call["arguments"], length)} for call in turn["calls"]]
    missing = len(turn["text"]) - length
    return {**turn, "calls": calls} | (
        {"text": turn["text"][:length], "num_hidden": turn["num_hidden"] + missing} if missing > 0 else {}
    )


def _record_in(line: bytes) -> Any:
    """Return the record in a line. It is empty if the line is not valid."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return {}


def _thumbnails(record: Any) -> list[str]:
    """Return the valid thumbnail names in a record. Others are skipped, because names become paths."""
    names = record.get("thumbnails") if isinstance(record, dict) else None
    return [name for name in names[:IMAGES_OF_A_SAMPLE] if is_thumbnail_name(name)] if isinstance(names, list) else []


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
        sample = shown_sample(record)
    except NO_RECORD:
        return None
    found: dict[str, Any] = {
        "step": sample.step,
        "split": _short(sample.split),
        "sample_id": _short(sample.sample_id),
        "prompt": _short(sample.prompt),
        "response": _short(sample.response),
        "reward": sample.reward,
        "verdict": sample.verdict,
    }
    if thumbnails := _thumbnails(record):
        found["thumbnails"] = thumbnails
    if sample.left_out:
        found["left_out"] = _short(sample.left_out)
    if sample.turns:
        found["conversation"] = _conversation_of_page(sample)
    return found


def _conversation_of_page(sample: ShownSample) -> dict[str, Any]:
    """Return a conversation for the report. A long conversation has only its first and last turns."""
    turns, most = list(zip(sample.turns, _seconds_of_turns(sample), strict=True)), MOST_TURNS // 2
    num_hidden = max(0, len(turns) - MOST_TURNS)
    shown = [*turns[:most], *turns[most + num_hidden :]] if num_hidden else turns
    times = sample.times
    return {
        "summary": conversation_summary(sample),
        "turns": [_turn_of_page(turn, seconds) for turn, seconds in shown],
        "num_hidden": num_hidden,
        "hidden_from": most,
        "times": None
        if times is None
        else times_json(times) | {"parts": [times.generation_s, times.tools_s, times.waiting_s]},
    }


def _seconds_of_turns(sample: ShownSample) -> list[tuple[float | None, ...]]:
    """Return seconds for each turn: of its text (None if the model did not write it), then of each of its calls."""
    times = sample.times or RolloutTimes(0.0)
    responses, calls = ((end - start for start, end in spans) for spans in (times.generation, times.tools))
    return [
        (next(responses, None) if turn.is_sampled else None, *(next(calls, None) for _ in turn.calls))
        for turn in sample.turns
    ]


def _turn_of_page(turn: ConversationTurn, seconds: Sequence[float | None]) -> dict[str, Any]:
    return {
        "role": _short(turn.role),
        "name": _short(turn.name),
        "text": turn.text[:LONGEST_TEXT],
        "num_hidden": max(0, len(turn.text) - LONGEST_TEXT),
        "sequence": turn.sequence,
        "num_tokens": turn.tokens[1] - turn.tokens[0],
        "sampled": turn.is_sampled,
        "trained": turn.is_trained,
        "seconds": seconds[0],
        "calls": [
            {
                "name": _short(call.name),
                "arguments": _short(call.arguments),
                "outcome": call.outcome,
                "failed": call.outcome in FAILED_OUTCOMES,
                "seconds": call_seconds,
            }
            for call, call_seconds in zip(turn.calls, seconds[1:], strict=True)
        ],
    }


def shown_sample(record: Mapping[str, Any]) -> ShownSample:
    """Return the sample to display for a record."""
    reward = record.get("reward")
    times = record.get("times")
    return ShownSample(
        step=int(record["step"]),
        split=str(record["split"]),
        sample_id=str(record["sample_id"]),
        prompt=str(record["prompt"]),
        response=str(record["response"]),
        reward=f"{float(reward):.4g}" if reward is not None and not math.isnan(float(reward)) else "",
        verdict=_verdict(record),
        left_out=str(record.get("left_out") or ""),
        num_tokens=int(record.get("num_tokens") or 0),
        turns=tuple(conversation_of(record.get("conversation", []))),
        times=None if times is None else times_of(times),
    )


class NewestConversation:
    """Reader of the first conversation of the newest step that has one, from the last lines of a growing file."""

    def __init__(self, run_folder: Path):
        self._path = run_folder / SAMPLES_FILE_NAME
        self._seen: tuple[int, int] | None = None
        self._found: ShownSample | None = None

    def read(self) -> ShownSample | None:
        """Return the conversation, or None if there is none yet."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if self._seen != (seen := (status.st_size, status.st_mtime_ns)):
                    file.seek(max(0, status.st_size - _LOOKED_AT))
                    self._found = _first_of_last_step(file.read(_LOOKED_AT))
                    self._seen = seen
        except OSError:
            return None
        return self._found


def _first_of_last_step(lines: bytes) -> ShownSample | None:
    found: ShownSample | None = None
    for line in reversed(lines.split(b"\n")[:-1]):
        if b'"conversation"' not in line:
            continue
        try:
            sample = shown_sample(json.loads(line))
        except NO_RECORD:  # the first line may be cut
            continue
        if found is not None and sample.step != found.step:
            break
        found = sample
    return found


def _verdict(record: Mapping[str, Any]) -> str:
    if record.get("fault"):
        return str(record["fault"])[:LONGEST_TEXT]
    return "right" if record.get("is_correct") else "truncated" if record.get("is_truncated") else "wrong"


def _short(text: Any, length: int = LONGEST_TEXT) -> str:
    words = str(text)
    return words if len(words) <= length else f"{words[:length].removesuffix(_CUT)}{_CUT}"


def evenly_spaced(number: int, most: int) -> Int[np.ndarray, " chosen"]:
    """Return at most `most` evenly spaced positions of 0 to `number` - 1, including the last one."""
    chosen = min(number, max(most, 1))
    return np.ceil(np.arange(1, chosen + 1) * number / max(chosen, 1)).astype(np.int64) - 1


def has_images(step: int) -> bool:
    """Return whether a training step saves images: all below 20, every tenth below 200, every hundredth below 2000."""
    return step % 10 ** (len(str(step // 2)) - 1) == 0
