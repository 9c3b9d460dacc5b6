# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Kinds of captured rows and classes of router margins, for the statistics. Imports no torch."""

from enum import IntEnum

MARGIN_EDGES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
"""Bounds of the classes of router margins. There is a class below the first and one above the last."""


class Row(IntEnum):
    """Columns of the agreement statistics. A row is a token in a layer."""

    EXPECTED = 0
    """Rows of tokens that the model was fed: all but the last one of a sequence."""
    USABLE = 1
    """Names existing experts, each once."""
    MISSING = 2
    """Expected, but consists of `UNKNOWN`."""
    ZERO = 3
    """Expert 0 in all slots: memory that was never written."""
    DUPLICATED = 4
    """Names an expert more than once, and is not `ZERO`."""
    OUT_OF_RANGE = 5
    """An id of no expert, or unknown ids among others."""
    UNEXPECTED = 6
    """Usable, but of a token that the model was not fed: padding, or the last of a sequence."""
    TAKEN_SAME = 7
    """The router took the captured set of experts. These are all usable rows under replay."""
    LIVE_SAME = 8
    """The router would choose the captured set by itself."""
    LIVE_SLOTS = 9
    """Number of captured experts (not rows) that the router would choose, up to `topk` per row."""
