# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of tables as records. Labels become their names, and numbers of low precision get their shortest spelling."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_rl_moe.data.record_values import RecordError, is_list
from nemo_rl_moe.data.text_files import bad_byte
from nemo_rl_moe.errors import one_line

if TYPE_CHECKING:
    from datasets import Dataset


def rows_of(table: "Dataset") -> "Iterator[dict[str, Any] | RecordError]":
    """Yield the rows in order. For a row with values that Python cannot represent, yield the error."""
    number = 0
    has_images = "Image(" in str(table.features)
    meant = {name: found for name, feature in table.features.items() if (found := _meaning(feature)) is not None}
    while number < len(table):
        try:
            rest = table.select(range(number, len(table)))
            # Without the arrow format, `datasets` would decode images of any size.
            for row in (one.to_pylist()[0] for one in rest.with_format("arrow")) if has_images else rest:
                yield {**row, **{name: of_value(row[name]) for name, of_value in meant.items()}}
                number += 1
        except UnicodeDecodeError as error:
            yield RecordError(f"not valid UTF-8: {bad_byte(error)} of a text")
        except (ValueError, OverflowError) as error:  # such as a time before the year 1
            yield RecordError(f"the row cannot be read: {one_line(error)}")
        number += 1


def _meaning(feature: Any) -> Callable[[Any], Any] | None:
    """Return a function that converts the stored values of a column, or None if the values need no conversion."""
    from datasets import ClassLabel, LargeList, List, Value

    if isinstance(feature, ClassLabel):
        return lambda value: feature.int2str(value) if isinstance(value, int) and value >= 0 else None
    if isinstance(feature, Value) and feature.dtype in ("float16", "float32"):
        # Otherwise 0.1 would become 0.10000000149011612.
        number = np.dtype(feature.dtype).type
        return lambda value: None if value is None else float(str(number(value)))
    if isinstance(feature, List | LargeList):
        inner = _meaning(feature.feature)
        return None if inner is None else lambda value: [inner(item) for item in value] if is_list(value) else value
    if isinstance(feature, Mapping):
        parts = {name: found for name, part in feature.items() if (found := _meaning(part)) is not None}
        if parts:
            return lambda value: (
                {key: parts[key](item) if key in parts else item for key, item in value.items()}
                if isinstance(value, Mapping)
                else value
            )
    return None
