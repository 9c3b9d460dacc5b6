# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Experts by writer of a token (model or tool): how far a tool's tokens go to other experts than the model's tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_rl_moe.shapes import Float, Int
from nemo_rl_moe.token_writers import ANSWER, CALL, RESULT


@dataclass(frozen=True)
class WriterLoad:
    """Number of tokens of each expert in a step, by writer (`token_writers.WRITERS`)."""

    layers: tuple[int, ...]
    counts: Int[np.ndarray, "writers layers experts"]


def jensen_shannon(
    one: Int[np.ndarray, "layers experts"], other: Int[np.ndarray, "layers experts"]
) -> Float[np.ndarray, " layers"]:
    """Return the Jensen-Shannon divergence of two expert loads in bits: 0 for equal shares, 1 for no common expert.

    NaN in a layer in which one of the loads has no tokens.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = [counts / counts.sum(-1, keepdims=True) for counts in (one, other)]
        middle = (shares[0] + shares[1]) / 2
        parts = [np.where(share > 0, share * np.log2(share / middle), 0.0).sum(-1) for share in shares]
    is_known = (one.sum(-1) > 0) & (other.sum(-1) > 0)
    return np.where(is_known, (parts[0] + parts[1]).clip(min=0) / 2, np.nan)


def divergences(counts: Int[np.ndarray, "writers layers experts"]) -> dict[str, Float[np.ndarray, " layers"]]:
    """Return by layer how far expert loads diverge: tool results from model tokens, and tool calls from answers."""
    return {
        "results_from_own": jensen_shannon(counts[RESULT], counts[CALL] + counts[ANSWER]),
        "calls_from_answers": jensen_shannon(counts[CALL], counts[ANSWER]),
    }


def writer_metrics(
    counts: Int[np.ndarray, "writers layers experts"], layers: Sequence[int], *, per_layer: bool
) -> dict[str, float]:
    """Return the metrics of a step, under `routing_writers/`: means over layers, and values of each layer."""
    metrics: dict[str, float] = {}
    for name, of_layers in divergences(counts).items():
        if np.isnan(of_layers).any():  # a writer has no tokens, which then holds for every layer
            continue
        metrics[f"routing_writers/{name}"] = float(of_layers.mean())
        if per_layer:
            metrics |= {
                f"routing_writers/{name}_layer_{layer}": float(value)
                for layer, value in zip(layers, of_layers, strict=True)
            }
    return metrics
