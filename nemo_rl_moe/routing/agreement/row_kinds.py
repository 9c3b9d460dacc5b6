# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Kinds of captured rows and classes of router margins, for the statistics. Imports no torch."""

from enum import IntEnum

MARGIN_EDGES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
"""Bounds of the classes of router margins. There is a class below the first and one above the last."""


class Row(IntEnum):
    """Kinds of captured rows: columns of the agreement statistics. A row has the experts of one token in one layer."""

    EXPECTED = 0
    """Rows of tokens that were inputs of the model: all but the last token of a sequence."""
    USABLE = 1
    """The row names existing experts, each once."""
    MISSING = 2
    """The row is expected, but was not captured (consists of `UNKNOWN`)."""
    ZERO = 3
    """The row is expert 0 in all slots: memory that was never written."""
    DUPLICATED = 4
    """The row names an expert more than once, and is not `ZERO`."""
    OUT_OF_RANGE = 5
    """The row has an id of no expert, or `UNKNOWN` among known ids."""
    UNEXPECTED = 6
    """The row is usable, but its token was no input of the model: padding, or the last token of a sequence."""
    TAKEN_SAME = 7
    """The router took the captured set of experts. Under replay, this holds for all usable rows."""
    LIVE_SAME = 8
    """The router would choose the captured set by itself."""
    LIVE_SLOTS = 9
    """Number of captured experts (not rows) that the router would choose, up to `topk` per row."""
