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
        self._has_moved: Bool[np.ndarray, " layers"] | None = None

    def metrics(self, bias: Float[np.ndarray, "layers experts"] | None) -> dict[str, float]:
        """Take the next step that has a bias, and return `expert_bias_frozen_layers`; empty for none."""
        if bias is None:
            return {}
        last, self._last = self._last, bias
        if last is None:
            self._has_moved = np.full(len(bias), bool(self._is_updated))
            return {}
        assert self._has_moved is not None
        stands = (bias == last).all(-1)
        self._has_moved |= ~stands
        frozen = 0 if self._is_updated is False else int((stands & self._has_moved).sum())
        return {"moe/routing/expert_bias_max_abs": float(np.abs(bias).max())} | (
            {"moe/expert_bias_frozen_layers": float(frozen)} if frozen else {}
        )
