# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""How one step reads as a line of text; pure, shared by the live display and the plain lines."""

from collections import deque
from collections.abc import Mapping

# Key, the label it gets, and how its value is written. Only keys that a step carries appear.
_TRAIN_FIELDS = (
    ("train/loss", "loss", ".4f"),
    ("train/reward", "reward", ".4f"),
    ("train/accuracy", "accuracy", ".4f"),
    ("train/grad_norm", "grad_norm", ".3g"),
    ("train/lr", "lr", ".1e"),
    ("train/moe/load_balancing_loss", "load_balancing_loss", ".3f"),
)
_VALIDATION_FIELDS = (("val/loss", "loss", ".4g"), ("val/accuracy", "accuracy", ".4g"))
_EPOCH_KEY = "train/epoch"
_SPEED_KEY = "timing/train/tokens_per_second"
_STEPS_REMEMBERED = 20


def train_line(step: int, total_steps: int, metrics: Mapping[str, float], seconds_left: float | None) -> str:
    """For example `step 12/200  loss 1.2345  grad_norm 0.93  lr 3.0e-03  9,812 tok/s  eta 1:03`.

    Empty when the step holds no training metrics.
    """
    if not any(key.startswith("train/") for key in metrics):
        return ""
    parts = [f"step {step}/{total_steps}"]
    if _EPOCH_KEY in metrics:
        parts.append(f"epoch {metrics[_EPOCH_KEY]:g}")
    parts += _fields(metrics, _TRAIN_FIELDS)
    if _SPEED_KEY in metrics:
        parts.append(f"{metrics[_SPEED_KEY]:,.0f} tok/s")
    if seconds_left is not None:
        parts.append(f"eta {clock_text(seconds_left)}")
    return "  ".join(parts)


def validation_line(step: int, metrics: Mapping[str, float]) -> str:
    """For example `step 50  validation: loss 0.81  accuracy 0.74`; empty when nothing was validated."""
    fields = _fields(metrics, _VALIDATION_FIELDS)
    return f"step {step}  validation: {'  '.join(fields)}" if fields else ""


def clock_text(seconds: float) -> str:
    """`0:07`, `1:03`, `2:05:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class TimeLeft:
    """Estimates the time left from the pace of the last steps, so that a slow first step is soon forgotten."""

    def __init__(self, total_steps: int):
        self._total_steps = total_steps
        self._seen: deque[tuple[int, float]] = deque(maxlen=_STEPS_REMEMBERED + 1)

    def update(self, step: int, now: float) -> float | None:
        """Notes that a step ended; returns the seconds left, None while only one step is known.

        Args:
            step: The step that has just ended.
            now: Seconds on any clock that only goes forward.
        """
        self._seen.append((step, now))
        first_step, first_time = self._seen[0]
        if step <= first_step:
            return None
        return max(0.0, (self._total_steps - step) * (now - first_time) / (step - first_step))


def _fields(metrics: Mapping[str, float], fields: tuple[tuple[str, str, str], ...]) -> list[str]:
    return [f"{label} {metrics[key]:{form}}" for key, label, form in fields if key in metrics]
