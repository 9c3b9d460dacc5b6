# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Cheapest partition of sequences into padded microbatches, by dynamic programming over their sorted lengths."""

from collections.abc import Sequence

import numpy as np

_NEVER = 2**62
_SCALE = 1 << 16
"""Units of cost per token. Each microbatch costs one unit more, so that fewer microbatches win among equally cheap
partitions."""


def cheapest_partition(
    lengths: Sequence[int], max_tokens: int, overhead: int, unit: int, most: Sequence[int] | None = None
) -> list[int]:
    """Split sorted sequences into runs (consecutive sequences that form a microbatch) of the least total cost.

    A run costs its number of sequences times its longest length, which is the padded computation, plus `overhead`
    tokens. Without `most`, no other partition is cheaper, not even one whose microbatches overlap in length, because
    their sequences can be exchanged, without a higher cost, until they do not overlap. Fewer runs win among
    equally cheap partitions.

    Args:
        lengths: Lengths of the sequences, longest first, each at least 1 and at most `max_tokens`.
        max_tokens: Maximum number of tokens of a run, padding included.
        overhead: Cost of a microbatch in tokens, at least 0.
        unit: The number of runs is a multiple of `unit`. Requires that the smallest possible number of runs, rounded
            up to a multiple of `unit`, is at most the number of lengths.
        most: For each length, the maximum number of sequences in a run that begins with it, at least 1. None for no
            limit.

    Returns:
        End of each run: the index after its last length, ascending.
    """
    number = len(lengths)
    # Cost of the cheapest partition of the first lengths, by their number and the number of runs modulo `unit`.
    cost = np.full((number + 1, unit), _NEVER, dtype=np.int64)
    previous = np.zeros((number + 1, unit), dtype=np.int64)
    cost[0, 0] = 0
    counts = np.arange(1, number + 1, dtype=np.int64)[:, None] * _SCALE
    for start, longest in enumerate(lengths):
        size = min(max_tokens // longest, number - start, number if most is None else most[start])
        one_more = np.roll(cost[start], 1) + overhead * _SCALE + 1
        found = counts[:size] * longest + one_more
        ends = slice(start + 1, start + 1 + size)
        better = found < cost[ends]
        np.copyto(cost[ends], found, where=better)
        np.copyto(previous[ends], start, where=better)
    ends_of_runs, end, remainder = [], number, 0
    while end > 0:
        ends_of_runs.append(end)
        end, remainder = int(previous[end, remainder]), (remainder - 1) % unit
    return ends_of_runs[::-1]
