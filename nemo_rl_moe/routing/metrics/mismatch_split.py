# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Split of the mismatch between rollout and training into the parts of routing, numerics and moved weights.

The gap of a token is its log-probability in training minus its log-probability in the rollout. A pass that replays the
experts of the rollout lies between both. It differs from the rollout only by the numerics of two engines, and from
training only by the experts. If the weights have moved since, a replayed pass with the weights that sampled the token
(`replayed_before`) adds one more part:

    own - generation = (own - replayed) + (replayed - replayed_before) + (replayed_before - generation)
      total          =     routing      +          staleness           +          numerics

per token, exact except for the rounding of log-probabilities to float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nemo_rl_moe.shapes import Float

LARGEST_LOG_RATIO = 20.0
"""Largest log-ratio of probabilities that is exponentiated, as in the losses: e^20 is half a billion."""

PerToken = Float[np.ndarray, " tokens"]


@dataclass(frozen=True)
class RatioLimits:
    """Limits of a probability ratio beyond which a loss clips it."""

    lower: float
    upper: float


def split_gap(
    generation: PerToken, replayed_before: PerToken, own: PerToken, replayed: PerToken | None = None
) -> dict[str, PerToken]:
    """Return the parts of each token's gap (log-probability in training minus that in the rollout), in nats, float64.

    Args:
        generation: Log-probabilities of the engine that sampled the tokens.
        replayed_before: Log-probabilities of the trainer, with the experts of the rollout and the weights that sampled
            them.
        own: Log-probabilities of the trainer, with the experts that its routers choose.
        replayed: Log-probabilities of the trainer, with the experts of the rollout and the weights of `own`, if these
            weights are newer.

    Returns:
        `total`, and its parts `routing`, `numerics`, and `staleness` if the weights have moved. The parts sum to
        `total`.
    """
    generation, replayed_before, own = (values.astype(np.float64) for values in (generation, replayed_before, own))
    parts = {"total": own - generation, "numerics": replayed_before - generation}
    if replayed is None:
        return parts | {"routing": own - replayed_before}
    now = replayed.astype(np.float64)
    return parts | {"routing": own - now, "staleness": now - replayed_before}


def gap_metrics(gap: PerToken, limits: RatioLimits | None = None) -> dict[str, float]:
    """Return metrics of the size of a gap, the differences `d` of tokens' log-probabilities, or of a part of a gap.

    - `mean_abs`, `max_abs`: mean and maximum of its absolute value, in nats
    - `kl`: mean of `exp(d) - 1 - d`, the k3 estimate of the divergence of two distributions whose log-probabilities
      differ by `d` (http://joschu.net/blog/kl-approx.html), nats
    - `mult_prob_error`: mean of `exp(|d|)`, 1 without a gap
    - `effective_samples`: `(sum w)^2 / (n sum w^2)` of the importance weights `w = exp(d)`, 1 without a gap
    - `clip_fraction`: share of tokens whose ratio `exp(d)` is beyond the limits
    """
    bounded = gap.clip(max=LARGEST_LOG_RATIO)
    weights = np.exp(bounded)
    size = np.abs(gap)
    metrics = {
        "mean_abs": float(size.mean()),
        "max_abs": float(size.max()),
        "kl": float((np.expm1(bounded) - bounded).mean()),
        "mult_prob_error": float(np.exp(size.clip(max=LARGEST_LOG_RATIO)).mean()),
        "effective_samples": float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum())),
    }
    if limits is not None:
        metrics["clip_fraction"] = float(((weights < limits.lower) | (weights > limits.upper)).mean())
    return metrics


def variance_shares(parts: Mapping[str, PerToken]) -> dict[str, float]:
    """Return part -> its covariance with the total over the total's variance. They sum to 1. Empty without variance."""
    centered = parts["total"] - parts["total"].mean()
    variance = float(np.square(centered).sum())
    if variance == 0:
        return {}
    others = {name: values for name, values in parts.items() if name != "total"}
    return {name: float((values - values.mean()) @ centered) / variance for name, values in others.items()}


def split_metrics(parts: Mapping[str, PerToken], limits: RatioLimits | None = None) -> dict[str, float]:
    """Return the metrics of `gap_metrics` and `variance_share` for all parts, as `{metric}_{part}`."""
    metrics = {
        f"{name}_{part}": value for part, gap in parts.items() for name, value in gap_metrics(gap, limits).items()
    }
    return metrics | {f"variance_share_{part}": share for part, share in variance_shares(parts).items()}
