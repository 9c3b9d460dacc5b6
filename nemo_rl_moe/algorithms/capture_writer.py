# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes a run's measured sequences as a capture folder for `nemo-rl-moe audit`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float
from torch import Tensor

from nemo_rl_moe.distributed.batch import Axis, StoredColumn, TokenBatch
from nemo_rl_moe.distributed.stored_rows import Fetch, fetch_rows
from nemo_rl_moe.errors import DataError
from nemo_rl_moe.rollouts.trajectory import TokenSequence, Trajectory
from nemo_rl_moe.routing.indexer_replay import INDEXER_POSITIONS
from nemo_rl_moe.routing.replay import ROUTED_EXPERTS
from nemo_rl_moe.runs.folder.capture_folder import CaptureFolderWriter
from nemo_rl_moe.runs.folder.captured_sequences import CaptureDescription, CapturedSequence

_WRITER = "driver"
PerToken = Float[Tensor, "sequences tokens"]


@dataclass(frozen=True)
class MeasuredPass:
    """One log-probability pass over the first sequences of a sample.

    Attributes:
        logprobs: Log-probability of each token given the previous ones.
        routes: Experts that the routers chose in the pass. None if the caller needs no experts.
    """

    logprobs: PerToken
    routes: StoredColumn | None = None


@dataclass(frozen=True)
class CapturedRow:
    """Origin of one row of a batch: the token sequence in the row, and the trajectory that contains the sequence."""

    trajectory: Trajectory
    sequence: TokenSequence


def captured_rows(trajectories: Sequence[Trajectory]) -> list[CapturedRow]:
    """Return the origin of each row of the batch that is made of these trajectories."""
    return [CapturedRow(trajectory, sequence) for trajectory in trajectories for sequence in trajectory.sequences]


def moe_layers(moe_configuration: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the numbers, from 0, of the model's `num_layers` MoE layers."""
    frequency = moe_configuration.get("moe_layer_freq") or 1
    if isinstance(frequency, list):
        return tuple(layer for layer, has_experts in enumerate(frequency) if has_experts)
    return tuple(frequency * number for number in range(num_layers))


class CaptureWriter:
    """Writer of measured sequences (tokens, log-probabilities, routed experts) to a folder for `nemo-rl-moe audit`.

    Args:
        warn: Called once if writing fails. The run continues without its capture.
        is_exact: Whether engine and trainer compute in float32, and the trainer measures with the weights that
            sampled the tokens.
    """

    def __init__(
        self,
        folder: Path,
        moe_configuration: Mapping[str, Any],
        warn: Callable[[str], None],
        fetch: Fetch,
        *,
        is_exact: bool = False,
    ):
        self._folder, self._moe, self._warn, self._fetch = folder, moe_configuration, warn, fetch
        self._is_exact = is_exact
        self._writer: CaptureFolderWriter | None = None
        self._failed = False

    def write(
        self,
        step: int,
        sample: TokenBatch,
        rows: Sequence[CapturedRow],
        own: MeasuredPass,
        replayed: PerToken | None,
        repeated: MeasuredPass,
        expert_biases: Float[np.ndarray, "2 layers experts"] | None = None,
    ) -> None:
        """Add the measurements of one step.

        Args:
            step: Counted from 1.
            sample: The sequences, with the rollout's routes and indexers' positions if there are any.
            rows: Trajectory and sequence of each row of the sample.
            own: Pass in which the routers choose the experts.
            replayed: Log-probabilities with the experts of the rollout.
            repeated: Pass like `own` over the first sequences, but with another composition of the batches.
            expert_biases: Expert biases before the last update, and now. None if updates do not change them.
        """
        if self._failed:
            return
        part = len(repeated.logprobs)
        try:
            assert own.routes is not None
            sequences = self._sequences(sample, rows, own, replayed, repeated)
            if self._writer is None:
                described = self._description(own.routes, sample.stored.get(INDEXER_POSITIONS))
                self._writer = CaptureFolderWriter(self._folder, described, _WRITER)
            before, now = (None, None) if expert_biases is None else expert_biases
            # A file has only the columns that all of its sequences have.
            for some in filter(None, (sequences[:part], sequences[part:])):
                self._writer.write(step, some, now, before)
        except (OSError, ValueError, DataError, pa.ArrowException) as error:
            self._failed = True
            self._warn(f"{self._folder}: cannot be written, no further capture is saved: {error}")

    def _description(self, routes: StoredColumn, positions: StoredColumn | None) -> CaptureDescription:
        num_layers, topk = routes.row_shape
        num_indexers, num_positions = (0, 0) if positions is None else positions.row_shape
        return CaptureDescription(
            moe_layers(self._moe, num_layers),
            int(self._moe["num_moe_experts"]),
            topk,
            "nemo-rl-moe grpo",
            self._is_exact,
            indexer_shape=(num_indexers, num_positions),
        )

    def _sequences(
        self,
        sample: TokenBatch,
        rows: Sequence[CapturedRow],
        own: MeasuredPass,
        replayed: PerToken | None,
        repeated: MeasuredPass,
    ) -> list[CapturedSequence]:
        advantages = sample.columns["advantages"]
        logprobs = {
            "rollout_logprobs": sample.columns["generation_logprobs"].values,
            "training_logprobs": own.logprobs,
            "repeated_logprobs": repeated.logprobs,
        }
        if replayed is not None:
            logprobs["replayed_logprobs"] = replayed
        experts = {
            "rollout_experts": self._fetched(sample, sample.stored.get(ROUTED_EXPERTS)),
            "rollout_indexer": self._fetched(sample, sample.stored.get(INDEXER_POSITIONS)),
            "training_experts": self._fetched(sample, own.routes),
            "repeated_experts": self._fetched(sample, repeated.routes),
        }
        found = []
        for row, made in enumerate(rows):
            length = int(sample.lengths[row])
            of_tokens: dict[str, np.ndarray] = {
                "token_ids": sample.input_ids[row, :length].numpy(),
                "loss_mask": sample.token_mask[row, :length].numpy(),
                "weight_versions": np.asarray(made.sequence.weight_versions),
                "advantages": advantages.values[row].expand(length).numpy()
                if advantages.axis is Axis.SEQUENCE
                else advantages.values[row, :length].numpy(),
            }
            of_tokens |= {name: values[row, :length].numpy() for name, values in logprobs.items() if row < len(values)}
            of_tokens |= {name: chosen[row][:length] for name, chosen in experts.items() if row < len(chosen)}
            name, reward = f"{made.trajectory.sample_id} ({row})", made.trajectory.reward
            found.append(CapturedSequence(name, length, of_tokens, reward))
        return found

    def _fetched(self, sample: TokenBatch, column: StoredColumn | None) -> np.ndarray:
        """Return the choices that a column stores for each sequence, or an empty array if the column is None."""
        if column is None:
            return np.zeros(0, dtype=np.int16)
        longest = sample.input_ids.shape[1]
        return fetch_rows(column.rows, longest, column.fill, self._fetch, column.row_shape, column.dtype)
