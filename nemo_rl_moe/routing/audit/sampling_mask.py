# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rollout log-probabilities that are normalised over a top-p or top-k subset, while training's are not.

If a token's subset has the probability `m`, then `log p_rollout = log p - log m`. So training's log-probability is
lower by `-log m` at every token. Under top-p this is at most `-log top_p`. The numerics of two engines differ in both
directions. The rollout samples the tokens. So the mean of `p_training / p_rollout` is 1 for any two distributions on
the same tokens, and with a subset it is the mean of `m`.
"""

import numpy as np

from nemo_rl_moe.shapes import Float

_LEAST_TOKENS, _LEAST_SHARE, _SIGMAS = 200, 0.02, 6.0
_NOISES, _LEAST_GAP, _MOST_ABOVE, _LEAST_FLOOR = 3.0, 0.01, 0.1, 0.05
_FLOOR_QUANTILE = 0.001


def subset_metrics(gap: Float[np.ndarray, " tokens"]) -> dict[str, float]:
    """Return `subset_mass` and `subset_floor`, the mean and lowest probability of the sampled subsets. Empty if the
    log-probabilities show no subsets.

    Args:
        gap: Log-probabilities of training minus those of the rollout, in nats, all finite.
    """
    if len(gap) < _LEAST_TOKENS:
        return {}
    higher = gap[gap > 0]  # made positive by rounding alone, so their size is the rounding of all gaps
    noise = float(np.sqrt(np.square(higher).mean())) if len(higher) else 0.0
    threshold = max(_LEAST_GAP, _NOISES * noise)
    above, below = int((gap > threshold).sum()), int((gap < -threshold).sum())
    if below < _LEAST_SHARE * len(gap) or above > _MOST_ABOVE * below:
        return {}
    weights = np.exp(gap)
    mean, error = float(weights.mean()), float(weights.std() / np.sqrt(len(gap)))
    floor = float(np.quantile(weights, _FLOOR_QUANTILE))
    if (below - above) < _SIGMAS * (below + above) ** 0.5 or 1 - mean < _SIGMAS * error or floor < _LEAST_FLOOR:
        return {}
    return {"subset_mass": mean, "subset_floor": floor}
