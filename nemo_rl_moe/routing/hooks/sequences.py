# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversion of recorded passes to sequences without padding. The passes of a generation are joined.

Sequences of a rollout and of training are matched by their token ids.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nemo_rl_moe.routing.hooks.pass_recorder import RoutedPass
from nemo_rl_moe.routing.metrics.metric_keys import indices_of_layers
from nemo_rl_moe.routing.routers import RouterLayer
from nemo_rl_moe.runs.folder.captured_sequences import CaptureDescription, CapturedSequence
from nemo_rl_moe.shapes import Float, Int


@dataclass(frozen=True)
class RoutedSequence:
    token_ids: Int[np.ndarray, " tokens"]
    experts: Int[np.ndarray, "tokens layers topk"]
    margins: Float[np.ndarray, "tokens layers"] | None


def sequences_of(passes: Sequence[RoutedPass]) -> list[RoutedSequence]:
    """Return the sequences of some passes.

    A pass with a key-value cache continues the sequences of the previous pass if it begins at the position at which the
    previous pass ends. Passes that continue an unrecorded pass, and passes without token ids, are skipped.
    """
    found: list[RoutedSequence] = []
    parts: list[RoutedPass] = []
    for routed in passes:
        if routed.shape is None:
            continue
        if not _continues(parts, routed):
            found += _joined(parts)
            parts = []
        if parts or not routed.num_cached:
            parts.append(routed)
    return found + list(_joined(parts))


def _continues(parts: Sequence[RoutedPass], routed: RoutedPass) -> bool:
    shapes = [part.shape for part in parts if part.shape is not None]
    if not shapes or routed.shape is None or not routed.num_cached:
        return False
    return routed.shape[0] == shapes[0][0] and routed.num_cached == sum(columns for _, columns in shapes)


def _joined(parts: Sequence[RoutedPass]) -> Iterator[RoutedSequence]:
    """Yield the sequences of a batch from the successive passes that generated them."""
    if not parts:
        return
    by_row: dict[str, list[torch.Tensor]] = {"token_ids": [], "real": [], "experts": [], "margins": []}
    for part in parts:
        for name, values in by_row.items():
            found = getattr(part, name)
            if found is not None and part.shape is not None:
                values.append(found.unflatten(0, part.shape))
    token_ids, real, experts = (torch.cat(by_row[name], 1) for name in ("token_ids", "real", "experts"))
    margins = torch.cat(by_row["margins"], 1) if len(by_row["margins"]) == len(parts) else None
    for row, is_real in enumerate(real):
        yield RoutedSequence(
            token_ids[row][is_real].numpy(),
            experts[row][is_real].numpy(),
            None if margins is None else margins[row][is_real].numpy(),
        )


def capture_description(layers: Sequence[RouterLayer], made_by: str) -> CaptureDescription:
    """Return the capture description of a model whose layers all have the same number of experts."""
    indices = indices_of_layers([layer.key for layer in layers])
    return CaptureDescription(tuple(indices.values()), layers[0].num_experts, layers[0].topk, made_by)


def training_sequences(training: Sequence[RoutedSequence]) -> list[CapturedSequence]:
    """Return training sequences in the form of a capture, without routes of a rollout."""
    return [
        CapturedSequence(str(number), len(sequence.token_ids), _training_columns(sequence))
        for number, sequence in enumerate(training)
        if len(sequence.token_ids)
    ]


def paired_sequences(
    rollout: Sequence[RoutedSequence], training: Sequence[RoutedSequence], first: int = 0
) -> list[CapturedSequence]:
    """Return training sequences with the routes of the rollout that sampled them. Drop sequences without a rollout.

    In a rollout, the model reads a sequence without its last token. If other sequences of the batch are longer, it also
    reads the last token and padding. So a recorded rollout belongs to a training sequence if its tokens begin with the
    tokens of the sequence, or equal them without the last one.
    """
    found = []
    for number, sequence in enumerate(training, start=first):
        fed = len(sequence.token_ids) - 1
        sampled = next((sampled for sampled in rollout if _sampled(sampled, sequence)), None) if fed > 0 else None
        if sampled is not None:
            columns = _training_columns(sequence) | {"rollout_experts": sampled.experts[:fed]}
            found.append(CapturedSequence(str(number), fed + 1, columns))
    return found


def _sampled(sampled: RoutedSequence, sequence: RoutedSequence) -> bool:
    fed = len(sequence.token_ids) - 1
    if len(sampled.token_ids) < fed or not np.array_equal(sampled.token_ids[:fed], sequence.token_ids[:fed]):
        return False
    return len(sampled.token_ids) == fed or bool(sampled.token_ids[fed] == sequence.token_ids[fed])


def _training_columns(sequence: RoutedSequence) -> dict[str, np.ndarray]:
    columns = {"token_ids": sequence.token_ids.astype(np.int32), "training_experts": sequence.experts}
    return columns if sequence.margins is None else columns | {"margins": sequence.margins}
