# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Sequences of a capture in memory, and the names and meanings of their columns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nemo_rl_moe.shapes import Shaped

UNKNOWN = -1

EXPERTS = ("rollout_experts", "training_experts", "repeated_experts")
"""`[tokens, layers, topk]` int16, -1 if unknown: experts of the rollout, of training, and of a second training pass
with differently composed batches."""
INDEXERS = ("rollout_indexer", "training_indexer")
"""`[tokens, indexer layers, k]` int32, -1 if unknown: positions in the sequence that sparse attention chose."""
LOGPROBS = ("rollout_logprobs", "training_logprobs", "replayed_logprobs", "repeated_logprobs")
"""Log-probability of each token, nats: by the engine that sampled it, by the trainer with the experts of its routers,
by the trainer with the rollout's experts, and by the trainer in a second pass with differently composed batches."""
TOKEN_TYPES: Mapping[str, type[np.generic]] = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    **dict.fromkeys(EXPERTS, np.int16),
    **dict.fromkeys(LOGPROBS, np.float32),
    "weight_versions": np.int32,
    "advantages": np.float32,
    "margins": np.float32,
    "kept_mass": np.float32,
    **dict.fromkeys(INDEXERS, np.int32),
}
"""Columns on the token axis. `kept_mass`: probability of the tokens that top-p and top-k leave. `rollout_logprobs` are
normalised over these tokens. `margins`, `[tokens, layers]`: score of the last expert that a training router chose minus
the best score of an expert that it did not choose."""


@dataclass(frozen=True)
class CaptureDescription:
    """Content of `capture.json`.

    Attributes:
        layers: Indices of the MoE layers in the model, ascending.
        is_exact: Whether rollout and training had the same weights and computed in float32, so that their routes differ
            only in near ties.
        is_bitwise: Whether the trainer claims log-probabilities that are bitwise equal to the engine's.
        bias_is_updated: Whether training changes the expert bias after every step. None if unknown.
        indexer_shape: (number of layers with an indexer, number of positions per token in each layer).
    """

    layers: tuple[int, ...]
    num_experts: int
    topk: int
    made_by: str = ""
    is_exact: bool = False
    is_bitwise: bool = False
    bias_is_updated: bool | None = None
    indexer_shape: tuple[int, int] = (0, 0)

    @property
    def row_sizes(self) -> Mapping[str, tuple[int, ...]]:
        """Column -> its shape after the token axis, for columns with further axes."""
        experts = dict.fromkeys(EXPERTS, (len(self.layers), self.topk))
        return {**experts, **dict.fromkeys(INDEXERS, self.indexer_shape), "margins": (len(self.layers),)}


@dataclass(frozen=True)
class CapturedSequence:
    """One sequence to write.

    Attributes:
        columns: Name -> values, `[tokens, ...]`. Experts may lack the last token, since no engine is fed it.
    """

    name: str
    num_tokens: int
    columns: Mapping[str, Shaped[np.ndarray, "tokens ..."]]
    reward: float | None = None


@dataclass(frozen=True)
class CapturedRows:
    """Concatenated sequences of one step.

    Attributes:
        columns: Name -> values of all tokens, `[tokens, ...]`, for columns that all of these sequences have.
        rewards: Reward of each sequence. None if one is missing.
        writer: Name of the writer, such as a rank. Empty if unknown.
        expert_bias: Bias of the training routers at this step. None if not stored with these sequences.
        expert_bias_before: The bias before the last optimizer step that was not skipped. None if unknown.
    """

    step: int
    names: tuple[str, ...]
    lengths: Shaped[np.ndarray, " sequences"]
    columns: Mapping[str, Shaped[np.ndarray, "tokens ..."]]
    rewards: Shaped[np.ndarray, " sequences"] | None
    writer: str = ""
    expert_bias: Shaped[np.ndarray, "layers experts"] | None = None
    expert_bias_before: Shaped[np.ndarray, "layers experts"] | None = None


def checked_column(
    description: CaptureDescription, sequence: CapturedSequence, name: str
) -> Shaped[np.ndarray, "tokens ..."] | None:
    """Return a column, with a row for the last token if that was missing. None if the sequence lacks the column."""
    if name not in sequence.columns:
        return None
    values = np.asarray(sequence.columns[name])
    row = description.row_sizes.get(name, ())
    expected = (sequence.num_tokens, *row)
    if name in (*EXPERTS, *INDEXERS) and values.shape == (sequence.num_tokens - 1, *row):
        values = np.concatenate([values, np.full((1, *row), UNKNOWN, dtype=values.dtype)])
    if values.shape != expected:
        raise ValueError(f"{sequence.name}: {name} has the shape {values.shape}, expected {expected}")
    return values


def rows_of(description: CaptureDescription, step: int, sequences: Sequence[CapturedSequence]) -> CapturedRows:
    """Return sequences in memory in the form that `read_step` yields."""
    columns = {}
    for name, kind in TOKEN_TYPES.items():
        values = [checked_column(description, sequence, name) for sequence in sequences]
        if name == "rollout_experts" and any(part is not None for part in values):
            # A part of the rollout lost its routes: the column is kept, so that the audit finds the gap.
            row = description.row_sizes[name]
            values = [
                np.full((sequence.num_tokens, *row), UNKNOWN) if part is None else part
                for part, sequence in zip(values, sequences, strict=True)
            ]
        if all(part is not None for part in values):
            columns[name] = np.concatenate([part for part in values if part is not None]).astype(kind)
    rewards = [sequence.reward for sequence in sequences if sequence.reward is not None]
    return CapturedRows(
        step,
        tuple(sequence.name for sequence in sequences),
        np.array([sequence.num_tokens for sequence in sequences], dtype=np.int64),
        columns,
        np.array(rewards, dtype=np.float32) if len(rewards) == len(sequences) else None,
    )


def sequences_of(rows: CapturedRows) -> list[CapturedSequence]:
    """Return the sequences of a capture's rows."""
    ends = np.cumsum(rows.lengths)
    return [
        CapturedSequence(
            name,
            int(length),
            {column: values[end - length : end] for column, values in rows.columns.items()},
            None if rows.rewards is None else float(rows.rewards[number]),
        )
        for number, (name, length, end) in enumerate(zip(rows.names, rows.lengths, ends, strict=True))
    ]
