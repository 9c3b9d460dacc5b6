# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Detection of expert biases that stop changing over the steps of a capture."""

import numpy as np

from nemo_rl_moe.shapes import Bool, Float


class BiasHistory:
    """Detects layers whose expert bias stops changing, from the bias at successive steps.

    Args:
        is_updated: Whether training updates the bias after every step. None means unknown. Then only layers whose bias
            has changed before are expected to change.
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
        """Add the next step. Return the largest absolute value of its bias, and the number of frozen layers, if any.

        Args:
            bias: Bias of the step. None: the step is ignored.
            before: Bias before the last update, which should have changed it. Without it, the bias of the previous step
                is used, which is less certain: an even number of updates in between can restore a bias.
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
