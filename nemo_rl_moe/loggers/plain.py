# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Turns configuration values into the few types that YAML and JSON know."""

from collections.abc import Mapping
from enum import Enum
from typing import Any


def to_plain(value: Any) -> Any:
    """The same content as dicts, lists, text, numbers, booleans and None; anything else becomes its text."""
    if isinstance(value, Enum):
        return to_plain(value.value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
