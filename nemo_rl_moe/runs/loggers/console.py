# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The console: steps as lines of text, messages, warnings, and notices of other threads."""

import contextlib
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from nemo_rl_moe.errors import printable
from nemo_rl_moe.runs.folder.metrics import RunOutcome
from nemo_rl_moe.runs.folder.sample_text import Line
from nemo_rl_moe.runs.loggers.console_stream import LastingStream

# Key, label and format of each field. The most important fields come first, since a line has only the first ones that
# fit.
_TRAIN_FIELDS = (
    ("train/loss", "loss", ".4f"),
    ("train/reward", "reward", ".4f"),
    ("train/accuracy", "accuracy", ".4f"),
    ("train/critic/value_loss", "value_loss", ".4f"),
    ("train/critic/explained_variance", "explained_variance", ".3f"),
    ("train/teacher_kl", "teacher_kl", ".4f"),
    ("train/staleness/mean", "staleness", ".2g"),
    ("train/rollouts/idle_share/trainer", "trainer_idle", ".0%"),
    ("train/rollouts/idle_share/engines", "engines_idle", ".0%"),
    ("train/grad_norm", "grad_norm", ".3g"),
    ("train/moe/load_balancing_loss", "load_balancing_loss", ".3f"),
    ("train/lr", "lr", ".1e"),
)
_WIDTH = 120
_VALIDATION_FIELDS = (("val/loss", "loss", ".4g"), ("val/reward", "reward", ".4g"), ("val/accuracy", "accuracy", ".4g"))
_EPOCH_KEY = "train/epoch"
_SPEED_KEY = "timing/train/tokens_per_second"
_STEPS_REMEMBERED = 20


def train_line(step: int, total_steps: int, metrics: Mapping[str, float], seconds_left: float | None) -> str:
    """Return a line such as `step 12/200  loss 1.2345  lr 3.0e-03  eta 1:03`, of at most 120 columns."""
    if metrics.get("train/accuracy") == metrics.get("train/reward"):
        metrics = {key: value for key, value in metrics.items() if key != "train/accuracy"}
    begin, end = [f"step {step}/{total_steps}"], []
    if _EPOCH_KEY in metrics:
        begin.append(f"epoch {metrics[_EPOCH_KEY]:g}")
    if _SPEED_KEY in metrics:
        end.append(f"{metrics[_SPEED_KEY]:,.0f} tok/s")
    if seconds_left is not None:
        end.append(f"eta {clock_text(seconds_left)}")
    fields = _fields(metrics, _TRAIN_FIELDS)
    while fields and len("  ".join([*begin, *fields, *end])) > _WIDTH:
        fields.pop()
    return "  ".join([*begin, *fields, *end])


def validation_line(step: int, metrics: Mapping[str, float]) -> str:
    """Return a line such as `step 50  validation: loss 0.81  accuracy 0.74`. Empty without validation metrics."""
    fields = _fields(metrics, _VALIDATION_FIELDS)
    return f"step {step}  validation: {'  '.join(fields)}" if fields else ""


def clock_text(seconds: float) -> str:
    """Return seconds as text, such as `0:07`, `1:03` or `2:05:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class TimeLeft:
    """Estimates the time left from the pace of the last 20 steps, so that a slow first step is soon forgotten."""

    def __init__(self, total_steps: int):
        self._total_steps = total_steps
        self._seen: deque[tuple[int, float]] = deque(maxlen=_STEPS_REMEMBERED + 1)

    def update(self, step: int, now: float) -> float | None:
        """Return the number of seconds left after a step has ended. None at the first step."""
        self._seen.append((step, now))
        first_step, first_time = self._seen[0]
        if step <= first_step:
            return None
        return max(0.0, (self._total_steps - step) * (now - first_time) / (step - first_step))


def _fields(metrics: Mapping[str, float], fields: tuple[tuple[str, str, str], ...]) -> list[str]:
    return [f"{label} {metrics[key]:{form}}" for key, label, form in fields if key in metrics]


LiveMode = Literal["auto", "always", "never"]
_REFRESHES_PER_SECOND = 5
_SECONDS_BETWEEN_SHARES = 10.0
_BAR_WIDTH = 16


class ConsoleLogger:
    """Logger on the console. Messages, warnings and phases stay in order with the live line.

    In a terminal the current step is a live line at the bottom, below validation results and messages. Elsewhere every
    step is a new line, never wrapped. Text has no markup, and control characters are escaped.
    """

    name = "console"

    def __init__(
        self,
        total_steps: int,
        live: LiveMode = "auto",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        forced = {"auto": None, "always": True, "never": None}[live]
        lasting = cast(TextIO, LastingStream(stream))
        self._console = Console(file=lasting, force_terminal=forced, highlight=False, markup=False, emoji=False)
        in_terminal = self._console.is_terminal and not self._console.is_dumb_terminal
        self._is_live = live == "always" or (live == "auto" and in_terminal)
        self._total_steps = total_steps
        self._clock = clock
        self._time_left = TimeLeft(total_steps)
        self._display: Live | None = None
        self._phases: list[Spinner] = []
        self._step = 0
        self._step_line = ""

    def begin(self, total_steps: int) -> None:
        """Set the last step of training, which may depend on the length of the data set."""
        self._total_steps = total_steps
        self._time_left = TimeLeft(total_steps)

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        if any(key.startswith("train/") for key in metrics):
            seconds_left = self._time_left.update(step, self._clock())
            self._step, self._step_line = step, train_line(step, self._total_steps, metrics, seconds_left)
            if self._is_live:
                self._refresh()
            else:
                self._print(self._step_line)
        if validation := validation_line(step, metrics):
            self._print(validation, "bold")

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Do nothing: a configuration would push everything else off the screen."""

    def close(self, outcome: RunOutcome = "finished") -> None:
        """End the live line and print the last step. Messages still work afterwards."""
        if self._is_live and self._step_line:
            last, self._step_line = self._step_line, ""
            self._print(last)
        self._phases.clear()
        self._refresh()

    def message(self, text: str) -> None:
        self._print(text)

    def warn(self, text: str) -> None:
        self._print(f"warning: {text}", "yellow")

    def show(self, lines: Sequence[Line]) -> None:
        """Print lines of styled texts, with control characters escaped, since they may come from any file."""
        for line in lines:
            parts = [(printable(text, kept="\t"), style) for text, style in line]
            self._console.print(Text.assemble(*parts), soft_wrap=True)

    @contextmanager
    def phase(self, text: str) -> Iterator[Callable[[float], None]]:
        """Show a long phase, with its duration at the end. Yield a callback for the finished share, from 0 to 1."""
        started = last_shown = self._clock()
        spinner = Spinner("dots", Text(f"{printable(text)} ..."))

        def progress(share: float) -> None:
            nonlocal last_shown
            spinner.update(text=Text(f"{printable(text)} ... {share:.0%}"))
            if not self._is_live and self._clock() - last_shown >= _SECONDS_BETWEEN_SHARES:
                last_shown = self._clock()
                self._print(f"{text} ... {share:.0%}")

        if self._is_live:
            self._phases.append(spinner)
            self._refresh()
        else:
            self._print(f"{text} ...")
        outcome = "failed after"
        try:
            yield progress
            outcome = "done in"
        finally:
            if spinner in self._phases:
                self._phases.remove(spinner)
            self._print(f"{text}: {outcome} {self._clock() - started:.1f} s")
            self._refresh()

    def _print(self, text: str, style: str = "") -> None:
        # With soft wrap, rich does not break long lines: files keep them, and terminals wrap them.
        self._console.print(Text(printable(text), style=style), soft_wrap=True)

    def _refresh(self) -> None:
        """Start or update the live display if there is a phase or a step to show. Otherwise remove it."""
        if self._phases or (self._step_line and self._is_live):
            if self._display is None:
                # Transient: lines that should remain are printed separately.
                self._display = Live(
                    console=self._console,
                    get_renderable=self._render,
                    refresh_per_second=_REFRESHES_PER_SECOND,
                    transient=True,
                )
                self._display.start()
            self._display.refresh()
        elif self._display is not None:
            self._display.stop()
            self._display = None

    def _render(self) -> RenderableType:
        rows: list[RenderableType] = list(self._phases)
        if self._step_line:
            row = Table.grid(padding=(0, 1))
            bar = ProgressBar(total=max(1, self._total_steps), completed=self._step, width=_BAR_WIDTH)
            row.add_row(bar, Text(self._step_line))
            rows.append(row)
        return Group(*rows)


@contextmanager
def quiet(*logger_names: str, least: int = logging.ERROR) -> Iterator[None]:
    """Silence Python loggers below a level, since their lines would mix with the lines of the console."""
    loggers = [logging.getLogger(name) for name in logger_names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(least)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class Notices:
    """Shows messages and warnings of any thread on the console, or on standard error if the console fails."""

    def __init__(self, message: Callable[[str], None], warn: Callable[[str], None]):
        self._message, self._warn = message, warn

    def message(self, text: str) -> None:
        self._show(self._message, text, text)

    def warn(self, text: str) -> None:
        self._show(self._warn, text, f"warning: {text}")

    def _show(self, show: Callable[[str], None], text: str, line: str) -> None:
        try:
            show(text)
        except Exception:
            with contextlib.suppress(Exception):
                print(printable(line), file=sys.stderr)


def reason_of(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"the package {error.name} is not installed"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
