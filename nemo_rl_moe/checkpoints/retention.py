# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints to keep."""

import math
from collections.abc import Sequence


def steps_to_remove(
    checkpoints: Sequence[tuple[int, float | None]], keep_top_k: int | None, *, higher_is_better: bool
) -> list[int]:
    """The steps whose checkpoints are neither among the best nor the newest.

    A checkpoint without a value, or whose value is NaN, ranks below all that have one. Of equals, the newer one ranks
    higher.

    Args:
        checkpoints: Step and metric of each; each step once.
        keep_top_k: How many of the best to keep; None: all.
        higher_is_better: Whether more of the metric is better.

    Returns:
        Ascending steps.
    """
    if keep_top_k is None or not checkpoints:
        return []

    def rank(checkpoint: tuple[int, float | None]) -> tuple[bool, float, int]:
        step, value = checkpoint
        if value is None or math.isnan(value):
            return (False, 0.0, step)
        return (True, value if higher_is_better else -value, step)

    best = sorted(checkpoints, key=rank, reverse=True)[:keep_top_k]
    kept = {step for step, _ in best} | {max(step for step, _ in checkpoints)}
    return sorted(step for step, _ in checkpoints if step not in kept)
