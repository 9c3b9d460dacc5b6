# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Charts of metrics in a report, as defined in `charts.yaml`."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Chart:
    """Chart of a report.

    Attributes:
        lines: Metric -> label of its line. In a metric, `*` matches any text. If the label is None, the matched text is
            the label, and metrics of single layers are excluded.
        reference: (value, name) of a horizontal line.
        least_span: Smallest range of the vertical axis, for shares.
    """

    title: str
    caption: str
    lines: Mapping[str, str | None]
    reference: tuple[float, str] | None = None
    from_zero: bool = False
    least_span: float | None = None
    bars: bool = False


@dataclass(frozen=True)
class Section:
    heading: str
    charts: Sequence[Chart]


SECTIONS = {
    name: Section(section["heading"], [Chart(**chart) for chart in section["charts"]])
    for name, section in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items()
}
_PER_LAYER = re.compile(r"_layer_\d+")


def charts_of(keys: Iterable[str]) -> list[dict[str, Any]]:
    """Return the charts with any of these metrics, for the page's script."""
    in_order = sorted(keys)
    found = []
    for section in SECTIONS.values():
        for chart in section.charts:
            lines = [
                {"key": key, "label": label if label is not None else _wildcard(key, pattern)}
                for pattern, label in chart.lines.items()
                for key in in_order
                if fnmatchcase(key, pattern) and not (label is None and _PER_LAYER.search(key))
            ]
            if lines:
                found.append({"section": section.heading, **asdict(chart), "lines": lines})
    return found


def _wildcard(key: str, pattern: str) -> str:
    before, *_, after = pattern.split("*")
    return key.removeprefix(before).removesuffix(after)
