# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A chart of a report, as the lists of charts describe it."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Chart:
    """Chart of a report, left out where the runs lack all of its metrics.

    Attributes:
        section: Heading above it.
        lines: Metric to the line's label. In a key `*` stands for anything, where the label is None for no key of a
            single layer: the part that it matches is the label.
        reference: Value of a horizontal line to compare with, and its name.
    """

    section: str
    title: str
    caption: str
    lines: Mapping[str, str | None]
    reference: tuple[float, str] | None = None
    from_zero: bool = False
    bars: bool = False
