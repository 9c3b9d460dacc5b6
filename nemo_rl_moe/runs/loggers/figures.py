# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Figures in whole pixels, as PNG files; matplotlib is imported when the first one is drawn, which takes seconds."""

from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 100
LEFT, RIGHT, TOP, BOTTOM = 80, 130, 84, 64
"""Pixels around the axes; titles stand above."""


def as_png(figure: "Figure") -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    content = BytesIO()
    FigureCanvasAgg(figure).print_png(content)
    return content.getvalue()


def new_figure(size: tuple[int, int]) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] / DPI, size[1] / DPI), dpi=DPI, facecolor="white")
    figure.set_layout_engine("none")  # a user's settings may ask for one, which would move the cells
    return figure


def axes_at(figure: "Figure", left: int, top: int, width: int, height: int) -> "Axes":
    full_width, full_height = (round(inches * DPI) for inches in figure.get_size_inches())
    return figure.add_axes(
        (left / full_width, 1 - (top + height) / full_height, width / full_width, height / full_height)
    )


def add_title(figure: "Figure", title: str, summary: str) -> None:
    height = figure.get_size_inches()[1] * DPI
    left = LEFT / (figure.get_size_inches()[0] * DPI)
    figure.text(left, 1 - 30 / height, title, fontsize=14, fontweight="bold")
    figure.text(left, 1 - 56 / height, summary, fontsize=10)
