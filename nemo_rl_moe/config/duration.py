# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Spans of time as the configuration writes them."""

import re

DURATION_FORM = "DD:HH:MM:SS"
_PATTERN = re.compile(r"(\d{1,3}):(\d{1,2}):(\d{1,2}):(\d{1,2})")
_SECONDS = (86400, 3600, 60, 1)
_LIMITS = (1000, 24, 60, 60)


def parse_duration(text: str) -> int | None:
    """Seconds of a text such as `00:03:30:00`, three and a half hours; None where it has not the form DD:HH:MM:SS."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        return None
    parts = [int(part) for part in match.groups()]
    if any(part >= limit for part, limit in zip(parts, _LIMITS, strict=True)):
        return None
    return sum(part * seconds for part, seconds in zip(parts, _SECONDS, strict=True))


def format_duration(seconds: int) -> str:
    """The text that `parse_duration` reads as so many seconds, less than 1000 days."""
    parts = []
    for unit in _SECONDS:
        number, seconds = divmod(seconds, unit)
        parts.append(f"{number:02d}")
    return ":".join(parts)
