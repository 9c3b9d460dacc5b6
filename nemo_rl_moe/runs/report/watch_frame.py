# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A frame of the terminal view: header, sparklines of metrics, expert load, findings, conversation."""

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from rich.text import Text

from nemo_rl_moe.errors import printable
from nemo_rl_moe.routing.findings.tracker import likewise
from nemo_rl_moe.runs.folder.sample_text import LEGEND, ShownSample, TextLimits, sample_lines
from nemo_rl_moe.runs.loggers.console import clock_text
from nemo_rl_moe.runs.report.run_findings import Episodes
from nemo_rl_moe.runs.report.terminal_heatmap import terminal_heatmap
from nemo_rl_moe.runs.report.watch_state import AGREEMENT, LIVE_AGREEMENT, SHOWN_METRICS, WatchedRun

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-~=+*#"
NOT_FINITE = "!"
_LEAST_RELATIVE_SPAN = 1e-9  # smaller differences are rounding errors of means
_LEAST_SECONDS_OF_QUIET, _STEPS_OF_QUIET = 30.0, 10
_LEAST_WIDTH_WITH_RANGES = 80
_LABEL_WIDTH, _VALUE_WIDTH, _RANGE_WIDTH = 10, 10, 24
_LEAST_HEATMAP_LINES = 5
_LEAST_CONVERSATION_LINES, _MARGIN_OF_TURNS = 6, 36


@dataclass(frozen=True)
class Room:
    width: int
    height: int | None
    in_color: bool
    is_unicode: bool


def frame(run: WatchedRun, now: float, room: Room) -> list[Text]:
    header = _header(run, now, room.width)
    if run.step is None:
        return _cropped([*header, Text("nothing has been written yet; waiting for the first step")], room)
    sparklines = _sparklines(run, room)
    findings = _findings(run, room.width)
    if room.height is not None and len(findings) > (most := max(2, room.height // 4)):
        findings = [*findings[: most - 1], Text(f"and {len(findings) - most + 1} more lines", style="dim")]
    heatmap: list[Text] = []
    if run.load is not None:
        left = len(run.load.layers) + _LEAST_HEATMAP_LINES
        if room.height is not None:
            left = room.height - len(header) - len(sparklines) - len(findings) - 3
        if left >= _LEAST_HEATMAP_LINES:
            heatmap = terminal_heatmap(run.load, room.width, left, room.in_color)
    blocks = [block for block in (header, sparklines, heatmap, findings) if block]
    lines = [line for block in blocks for line in [*block, Text()]]
    rows = None if room.height is None else room.height - len(lines)
    conversation = _conversation(run.conversation, rows, room.width)
    return _cropped([*lines, *conversation] if conversation else lines[:-1], room)


def status(run: WatchedRun, now: float) -> str:
    """Return the state of the run as text: writing, quiet for some time, or all steps done."""
    planned = run.described.planned_steps
    if planned is not None and run.step is not None and run.step >= planned:
        return "all steps done"
    age = max(0.0, now - run.last_time)
    if age > max(_LEAST_SECONDS_OF_QUIET, _STEPS_OF_QUIET * (run.seconds_per_step or 0.0)):
        return f"quiet for {clock_text(age)}"
    return "writing"


def finding_lines(episodes: Sequence[Episodes]) -> list[str]:
    """Return one line for each kind of current findings, then one line for each kind of past findings."""
    groups: dict[tuple[bool, str], list[Episodes]] = {}
    for episode in episodes:
        groups.setdefault((episode.latest.is_over, episode.latest.kind), []).append(episode)
    return [_finding_line(group) for _, group in sorted(groups.items(), key=lambda item: item[0][0])]


def packed(parts: Iterable[str], width: int) -> list[str]:
    """Return lines of at most `width` characters, in which the parts are joined by two spaces."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return lines


def _header(run: WatchedRun, now: float, width: int) -> list[Text]:
    described = run.described
    name = printable(described.name, kept="")
    parts = [name if len(name) <= width else f"...{name[3 - width :]}"]
    if described.algorithm is not None:
        parts.append(described.algorithm)
    if run.step is not None:
        planned, pace = described.planned_steps, run.seconds_per_step
        has_total = planned is not None and planned >= run.step
        parts.append(f"step {run.step}/{planned}" if has_total else f"step {run.step}")
        if pace is not None:
            parts.append(f"{pace:.3g} s/step")
        if run.tokens_per_second is not None:
            parts.append(f"training {run.tokens_per_second:,.0f} tok/s")
        parts.append(f"elapsed {clock_text(max(0.0, run.last_time - run.first_time))}")
        state = status(run, now)
        if state == "writing" and has_total and pace is not None and planned is not None:
            parts.append(f"eta {clock_text((planned - run.step) * pace)}")
        parts.append(state)
    lines = [Text(line) for line in packed(parts, width)]
    lines[0].stylize("bold", 0, len(parts[0]))
    return lines


def _sparklines(run: WatchedRun, room: Room) -> list[Text]:
    levels = BLOCKS if room.is_unicode else ASCII
    has_ranges = room.width >= _LEAST_WIDTH_WITH_RANGES
    width = room.width - _LABEL_WIDTH - _VALUE_WIDTH - (_RANGE_WIDTH if has_ranges else 0)
    lines = []
    for key, label in SHOWN_METRICS.items():
        if key not in run.series:
            continue
        values = [value for _, value in run.series[key]]
        line = Text.assemble(
            (f"{label:<{_LABEL_WIDTH}}", "dim"),
            (f"{sparkline(values, width, levels):<{max(width, 0)}}", "cyan"),
            (f"{values[-1]:>{_VALUE_WIDTH}.4g}", "bold"),
        )
        if has_ranges:
            finite = [value for value in values if math.isfinite(value)]
            span = f"{min(finite):.4g} to {max(finite):.4g}" if finite else ""
            line.append(f"  {span}", "dim")
        lines.append(line)
    if run.routing:
        lines.append(_routing(run))
    return lines


def _routing(run: WatchedRun) -> Text:
    """Return the line about routing: agreement of training with rollouts at the last step, steps with anomalies."""
    parts = []
    for key, label in ((AGREEMENT, "agreement"), (LIVE_AGREEMENT, "by itself")):
        if key in run.routing:
            parts.append(f"{label} {run.routing[key]:.4f}")
    wrong = f"wrong routes in {run.num_wrong_steps} step{'s' if run.num_wrong_steps > 1 else ''}"
    parts.append(wrong if run.num_wrong_steps else "no wrong routes")
    style = "yellow" if run.num_wrong_steps else ""
    return Text.assemble((f"{'routing':<{_LABEL_WIDTH}}", "dim"), (", ".join(parts), style))


def _findings(run: WatchedRun, width: int) -> list[Text]:
    lines = []
    for text in finding_lines(run.episodes) or ["no findings"]:
        style = "" if text == "no findings" else "dim" if text.startswith("over: ") else "yellow"
        lines += _wrapped(text, width, style)
    for note in run.notes:
        lines += _wrapped(f"note: {note}", width, "dim")
    return lines


def _conversation(sample: ShownSample | None, height: int | None, width: int) -> list[Text]:
    """Return the lines of the newest conversation, if there is room. The last line (times) is never hidden."""
    if sample is None or (height is not None and height < _LEAST_CONVERSATION_LINES):
        return []
    title = f"conversation, step {sample.step}, {sample.split}: {LEGEND}"
    limits = TextLimits(characters=max(width - _MARGIN_OF_TURNS, 20), lines=1)
    shown = [
        Text.assemble(*((printable(text, kept=""), style) for text, style in line))
        for line in sample_lines(sample, limits)
    ]
    most = len(shown) if height is None else height - 1
    if len(shown) > most:
        hidden = Text(f"    and {len(shown) - most + 1} more lines", style="dim")
        shown = [*shown[: most - 2], hidden, shown[-1]]
    return [Text(title, style="dim"), *shown]


def _wrapped(text: str, width: int, style: str) -> list[Text]:
    wrapped = textwrap.wrap(printable(text, kept=""), max(width, 10), initial_indent="- ", subsequent_indent="  ")
    return [Text(line, style=style) for line in wrapped]


def _finding_line(group: Sequence[Episodes]) -> str:
    first, *others = group
    line = first.latest.text
    if first.latest.is_over:
        line = f"over: {line}, until step {first.latest.last_step}"
    if first.number > 1:
        line += f" ({first.number} times since step {first.first_step})"
    return line + likewise([episode.latest for episode in others])


def _cropped(lines: Sequence[Text], room: Room) -> list[Text]:
    for line in lines:
        if not room.in_color:
            line.rstrip()
        line.truncate(room.width, overflow="ellipsis" if room.is_unicode else "crop")
    return list(lines if room.height is None else lines[: room.height])


def sparkline(values: Sequence[float], width: int, levels: str = BLOCKS) -> str:
    """Return values as characters of `levels`: the first for the lowest value, the last for the highest value.

    If there are more values than `width`, a character shows the mean of several values. `!` means NaN or infinity.
    """
    columns = _columns(np.asarray(values, dtype=np.float64), width)
    is_finite = np.isfinite(columns)
    finite = columns[is_finite] if is_finite.any() else np.zeros(1)
    lowest, span = finite.min(), np.ptp(finite)
    if span <= _LEAST_RELATIVE_SPAN * np.abs(finite).max():
        shares = np.full(len(columns), 0.5)
    else:
        shares = (np.where(is_finite, columns, lowest) - lowest) / span
    indices = np.minimum(shares * len(levels), len(levels) - 1).astype(int)
    return "".join(
        levels[index] if is_number else NOT_FINITE
        for index, is_number in zip(indices.tolist(), is_finite.tolist(), strict=True)
    )


def _columns(values: Float[np.ndarray, " steps"], width: int) -> Float[np.ndarray, " columns"]:
    number = min(len(values), max(width, 0))
    if number == 0:
        return np.zeros(0)
    edges = np.arange(number + 1) * len(values) // number
    sizes = np.diff(edges)
    with np.errstate(invalid="ignore"):
        means: Float[np.ndarray, " columns"] = np.add.reduceat(values, edges[:-1]) / sizes
    return means
