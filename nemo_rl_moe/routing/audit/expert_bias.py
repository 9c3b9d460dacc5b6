# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Expert biases over the steps of a capture: layers in which they stand still."""

import numpy as np

from nemo_rl_moe.shapes import Bool, Float


class BiasHistory:
    """Biases of the steps so far.

    Args:
        is_updated: Training moves the bias after every step; None: not known, then a layer that has moved should move.
    """

    def __init__(self, is_updated: bool | None = None):
        self._is_updated = is_updated
        self._last: Float[np.ndarray, "layers experts"] | None = None
        self._has_moved: Bool[np.ndarray, " layers"] | bool = bool(is_updated)

    def metrics(
        self,
        bias: Float[np.ndarray, "layers experts"] | None,
        before: Float[np.ndarray, "layers experts"] | None = None,
    ) -> dict[str, float]:
        """Take the next step that has a bias, and return `expert_bias_frozen_layers`; empty for none.

        Args:
            before: The bias before the last update, which should have moved it. Without it the step before must do:
                any number of updates may lie between, after an even number of which biases may be what they were.
        """
        if bias is None:
            return {}
        last, self._last = self._last, bias
        if before is not None:
            stands = (bias == before).all(-1)
        elif last is not None:
            stands = (bias == last).all(-1)
            self._has_moved = self._has_moved | ~stands
            stands &= self._has_moved
        else:
            return {}
        frozen = 0 if self._is_updated is False else int(stands.sum())
        return {"moe/routing/expert_bias_max_abs": float(np.abs(bias).max())} | (
            {"moe/expert_bias_frozen_layers": float(frozen)} if frozen else {}
        )
