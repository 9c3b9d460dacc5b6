# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Kinds of rows of a captured routing and classes of router margins, as they are counted; loads no torch."""

from enum import IntEnum

MARGIN_EDGES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
"""Bounds of the classes of router margins; a class below the first one and one above the last."""


class Row(IntEnum):
    """Kinds of rows, a column each of the agreement statistics; a row is a token in a layer."""

    EXPECTED = 0
    """Rows of tokens that were fed to the model: all but the last one of a sequence."""
    USABLE = 1
    """Name experts that there are, each once."""
    MISSING = 2
    """Expected, and `UNKNOWN` throughout."""
    ZERO = 3
    """Expert 0 as often as there are experts of a token: memory that nobody wrote."""
    DUPLICATED = 4
    """Another expert more than once."""
    OUT_OF_RANGE = 5
    """An expert that there is not, or unknown ones among others."""
    UNEXPECTED = 6
    """Usable, of a token that was not fed to the model: padding, or the last of a sequence."""
    TAKEN_SAME = 7
    """The router took the capture's set of experts: all usable rows under replay."""
    LIVE_SAME = 8
    """The router would choose the capture's set by itself."""
    LIVE_SLOTS = 9
    """Not rows: experts that the router would choose and the capture names, up to `topk` a row."""
