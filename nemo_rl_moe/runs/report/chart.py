# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The chart of a metric, or of several that belong together."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """Line of a chart, or several with one pattern.

    Attributes:
        pattern: A metric's key; `*` stands for anything, and where the label is None for no key of a single layer.
    """

    pattern: str
    label: str | None


@dataclass(frozen=True)
class Chart:
    """Chart of a report, left out where the runs lack all of its metrics.

    Attributes:
        section: Heading above it.
        reference: Value of a horizontal line to compare with, and its name.
    """

    section: str
    title: str
    caption: str
    lines: Sequence[Line]
    reference: tuple[float, str] | None = None
    from_zero: bool = False
    bars: bool = False
