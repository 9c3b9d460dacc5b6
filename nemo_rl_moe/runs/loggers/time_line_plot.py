# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Plot of the activity of trainer and engines in the last steps of asynchronous rollouts."""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from nemo_rl_moe.runs.folder.time_line import (
    ENGINE_STATES,
    GENERATING,
    TRAINER_STATES,
    WAITING,
    Interval,
    TimeLine,
    binned,
    seconds_of,
)
from nemo_rl_moe.runs.loggers.plots import LEFT, TOP, add_title, as_png, axes_at, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

TIME_LINE_KEY = "plots/time_line"
_WIDTH, _HEIGHT, _LEGEND = 1000, 150, 84
_BINS_OF_A_STEP = 1000
TRAINER_COLORS = ("#2166ac", "#e6ab02", "#b3b3b3", "#7a5195")
ENGINE_COLORS = ("#1b7837", "#d6604d", "#b3b3b3", "#92c5de", "#7a5195")


def time_line_plots(step: int, time_line: TimeLine) -> dict[str, bytes]:
    """Return key -> PNG file of the plot. Empty if the steps took no time."""
    if all(found.seconds <= 0 for found in time_line.steps):
        return {}
    return {TIME_LINE_KEY: as_png(draw_time_line(step, time_line))}


def draw_time_line(step: int, time_line: TimeLine) -> "Figure":
    """Return a plot of the states of trainer and engines over the seconds of the last steps."""
    figure = new_figure((LEFT + _WIDTH + 40, TOP + _HEIGHT + 56 + _LEGEND))
    axes = axes_at(figure, LEFT, TOP + 10, _WIDTH, _HEIGHT)
    steps, start_s = time_line.steps, time_line.steps[0].start_s
    for found in steps:
        _draw_row(axes, 1.0, found.trainer, TRAINER_COLORS, start_s)
        _draw_row(axes, 0.0, found.engines, ENGINE_COLORS, start_s)
        axes.axvline(found.start_s - start_s, color="0.3", linewidth=1)
    total_s = sum(found.seconds for found in steps)
    axes.set_xlim(0, total_s)
    axes.set_ylim(-0.5, 1.5)
    axes.set_yticks([0.0, 1.0], labels=["engines", "trainer"])
    axes.set_xlabel(f"seconds; at each line, training gets the rollouts of a step (last line: step {step})")
    _add_legend(axes)
    waiting = sum(seconds_of(found.trainer, WAITING) for found in steps) / total_s
    generating = sum(seconds_of(found.engines, GENERATING) for found in steps) / total_s
    summary = f"training waits for rollouts {waiting:.0%} of the time; engines generate {generating:.0%} of it"
    add_title(figure, f"Time line of the {len(steps)} steps up to step {step}", summary)
    return figure


def _draw_row(axes: "Axes", y: float, intervals: Sequence[Interval], colors: Sequence[str], start_s: float) -> None:
    """Draw a step, in bins narrower than a pixel, since engines may have thousands of intervals."""
    states = binned(intervals, _BINS_OF_A_STEP)
    width = (intervals[-1].end_s - intervals[0].start_s) / _BINS_OF_A_STEP
    at = intervals[0].start_s - start_s
    for state, bins in groupby(states.tolist()):
        length = len(list(bins)) * width
        axes.barh(y, length, 0.8, left=at, color=colors[state], linewidth=0)
        at += length


def _add_legend(axes: "Axes") -> None:
    from matplotlib.patches import Patch

    def add(part: str, states: Sequence[str], colors: Sequence[str], y: float) -> "Legend":
        handles = [Patch(color=color, label=f"{part}: {state}") for state, color in zip(states, colors, strict=True)]
        return axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, y), ncols=5, frameon=False)

    axes.add_artist(add("trainer", TRAINER_STATES, TRAINER_COLORS, -0.32))
    add("engines", ENGINE_STATES, ENGINE_COLORS, -0.52)
