# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A row of the table of NeMo-RL's keys, and how rows of one kind are written."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ENGINE = "a setting of their engine or kernels"
"""Reason for which what concerns their engine alone has no counterpart."""


@dataclass(frozen=True)
class Row:
    """A key of NeMo-RL, or all keys of a section (`section.*`), and its counterpart.

    Attributes:
        theirs: Full key.
        ours: Full key; None: no counterpart.
        note: What differs, or why there is no counterpart.
        convert: Converts the value; None: a rule does, from several keys.
        off: Value that asks for nothing, where that is not null, false, zero or empty.
        repeats: Key that this one may repeat, and then needs no counterpart.
    """

    theirs: str
    ours: str | None
    note: str = ""
    convert: Callable[[Any], Any] | None = lambda value: value
    off: Any = None
    repeats: str | None = None


def same_names(section: str, *names: str) -> tuple[Row, ...]:
    """Return rows of keys with the same names here."""
    return tuple(Row(f"{section}.{name}", f"{section}.{name}") for name in names)


def no_counterpart(section: str, note: str, *names: str, off: Any = None) -> tuple[Row, ...]:
    """Return rows of keys without a counterpart, all for one reason."""
    return tuple(Row(f"{section}.{name}", None, note, off=off) for name in names)
