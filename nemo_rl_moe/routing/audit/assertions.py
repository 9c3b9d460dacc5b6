# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Assertion on routes, for the tests of kernels, engines and frameworks."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from nemo_rl_moe.routing.audit.adapters.layout import array, expert_rows
from nemo_rl_moe.routing.audit.auditor import audit_step
from nemo_rl_moe.runs.folder.captured_sequences import UNKNOWN, CaptureDescription, CapturedSequence, rows_of
from nemo_rl_moe.shapes import Int


def assert_routes_agree(
    captured: Any,
    expected: Any,
    *,
    num_experts: int,
    least_agreement: float = 0.98,
    layers: Sequence[int] | None = None,
) -> None:
    """Check that captured routes belong to their tokens, layers and sequences.

    A range check would not detect a kernel that writes other experts. The error names rows that are malformed,
    repeated, have permuted expert ids, or belong to another layer, token or sequence. The order of a row's experts is
    ignored.

    Args:
        captured: Experts by an engine or a replay, integers `[tokens, layers, topk]`, or `[tokens, topk]` for one
            layer. An array, a tensor, or a list with one of them per sequence. -1 means unknown.
        expected: Experts by a reference implementation, in the same form.
        least_agreement: Least share of rows (tokens x layers) with the same set of experts. Use 1 for the same kernel
            and input, and less for a reference in another number format, which chooses differently at near ties.
        layers: Indices of the layers in the model, for the messages. Without them layers count from 0.

    Raises:
        AssertionError: The routes do not agree. The message names the rows and the kind of difference.
        DataError: Shapes or types do not fit routes.
    """
    pairs = list(zip(_sequences(captured, "captured"), _sequences(expected, "expected"), strict=True))
    if not pairs:
        raise AssertionError("captured: got no sequence")
    for number, (one, other) in enumerate(pairs):
        if one.shape != other.shape:
            raise AssertionError(f"sequence {number}: captured is {list(one.shape)}, expected {list(other.shape)}")
    num_layers, topk = pairs[0][0].shape[1:]
    numbers = tuple(range(num_layers)) if layers is None else tuple(layers)
    description = CaptureDescription(numbers, num_experts, topk)
    # The audit ignores the last token of a sequence. So each sequence gets an extra last token.
    sequences = [
        CapturedSequence(str(number), len(one) + 1, {"rollout_experts": one, "training_experts": other})
        for number, (one, other) in enumerate(pairs)
    ]
    audited = audit_step(description, 0, [rows_of(description, 0, sequences)])
    problems = [anomaly.text for anomaly in audited.anomalies]
    agreement = audited.metrics.get("moe/routing/live_agreement", float("nan"))
    if not agreement >= least_agreement:
        problems.append(
            f"{agreement:.4f} of the rows agree, expected at least {least_agreement:g}; {_first(pairs, numbers)}"
        )
    if problems:
        raise AssertionError("routes do not agree:\n" + "\n".join(f"  {text}" for text in problems))


def _sequences(routes: Any, where: str) -> list[Int[np.ndarray, "tokens layers topk"]]:
    parts = routes if isinstance(routes, list | tuple) and len(routes) and np.ndim(routes[0]) > 1 else [routes]
    found = []
    for number, part in enumerate(parts):
        rows = array(part, where)
        rows = rows[:, None] if rows.ndim == 2 else rows
        found.append(expert_rows(rows, len(rows), f"{where}: sequence {number}"))
    return found


def _first(pairs: Sequence[tuple[np.ndarray, np.ndarray]], layers: Sequence[int]) -> str:
    for number, (one, other) in enumerate(pairs):
        known = ((one != UNKNOWN) & (other != UNKNOWN)).all(-1)
        differs = np.argwhere(known & (np.sort(one, -1) != np.sort(other, -1)).any(-1))
        if len(differs):
            token, layer = differs[0].tolist()
            return (
                f"the first is token {token} of sequence {number} in layer {layers[layer]}: got"
                f" {one[token, layer].tolist()}, expected {other[token, layer].tolist()}"
            )
    return "no row is known on both sides"
