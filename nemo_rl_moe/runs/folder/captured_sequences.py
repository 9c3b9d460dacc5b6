# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Sequences of a capture in memory: what their columns are called and mean, whoever wrote them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nemo_rl_moe.shapes import Shaped

UNKNOWN = -1

EXPERTS = ("rollout_experts", "training_experts", "repeated_experts")
"""`[tokens, layers, topk]` int16, -1 where unknown: of the rollout, of training, and of training once more with another
composition of its batches."""
INDEXERS = ("rollout_indexer", "training_indexer")
"""`[tokens, indexer layers, k]` int32, -1 where unknown: positions in the sequence that sparse attention chose."""
LOGPROBS = ("rollout_logprobs", "training_logprobs", "replayed_logprobs", "repeated_logprobs")
"""Log-probability of each token, nats: by the engine that sampled it; by the trainer with the experts of its own
routers, with those of the rollout, and once more with another composition of its batches."""
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
"""Columns on the token axis. `kept_mass`: probability of the tokens that top-p and top-k leave, over which
`rollout_logprobs` are normalised. `margins`, `[tokens, layers]`: score of the last expert that a router of training
chose less that of the first one that it left out."""


@dataclass(frozen=True)
class CaptureDescription:
    """Meaning of the numbers of a folder.

    Attributes:
        layers: Indices of the MoE layers in the whole model, ascending.
        is_exact: Rollout and training had the same weights and computed in float32: their routes differ by near ties
            alone.
        is_bitwise: Their log-probabilities are said to be equal bit for bit.
        bias_is_updated: Training moves the expert bias after every step; None: not known.
        indexer_shape: Layers with an indexer, and positions of a token in each.
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
        """Axes behind the token's, of columns that have any."""
        experts = dict.fromkeys(EXPERTS, (len(self.layers), self.topk))
        return {**experts, **dict.fromkeys(INDEXERS, self.indexer_shape), "margins": (len(self.layers),)}


@dataclass(frozen=True)
class CapturedSequence:
    """One sequence as it is written.

    Attributes:
        columns: Values on the token axis; experts may end with the token before the last, which no engine feeds.
    """

    name: str
    num_tokens: int
    columns: Mapping[str, Shaped[np.ndarray, "tokens ..."]]
    reward: float | None = None


@dataclass(frozen=True)
class CapturedRows:
    """Some sequences of one step, one behind the other.

    Attributes:
        columns: Values of all tokens, `[tokens, ...]`; only columns that all of these sequences have.
        rewards: Reward of each sequence; None where any has none.
        writer: Who wrote them, such as one rank of several; empty where nobody says.
        expert_bias: Of the routers of training at this step; None: not among these sequences.
        expert_bias_before: Before the last optimizer step that was not skipped; None: not known.
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
    """Return a column as a capture has it: with a row for the last token too; None where the sequence has none."""
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
    """Return sequences that are in memory as a reader of a folder gives them."""
    columns = {}
    for name, kind in TOKEN_TYPES.items():
        values = [checked_column(description, sequence, name) for sequence in sequences]
        if name == "rollout_experts" and any(part is not None for part in values):
            # A path of the rollout has lost them, which is to be found.
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
    """Return the sequences that rows of a capture are made of."""
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
