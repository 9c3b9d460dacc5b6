# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Some of the responses that a run has kept, so that a reader sees how they change."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl_moe.loggers.samples import SAMPLES_FILE_NAME
from nemo_rl_moe.report.thinning import evenly_spaced

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
