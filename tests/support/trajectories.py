# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Token sequences and trajectories by hand, and their comparison."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import numpy as np

from nemo_rl_moe.distributed.batch import ModelInput
from nemo_rl_moe.distributed.stored_rows import StoredRows
from nemo_rl_moe.rollouts.trajectory import NOT_SAMPLED, TokenSequence, Trajectory


def tokens_of(
    given: Sequence[int],
    sampled: Sequence[int] = (),
    logprobs: Sequence[float] | None = None,
    *,
    version: int = 0,
    routed_experts: StoredRows | None = None,
    model_inputs: Mapping[str, ModelInput] | None = None,
) -> TokenSequence:
    """Return a sequence of given tokens and sampled ones behind them, by default of log-probability -0.5."""
    before, after = len(given), len(sampled)
    return TokenSequence(
        token_ids=np.array([*given, *sampled], dtype=np.int64),
        loss_mask=np.array([False] * before + [True] * after),
        logprobs=np.array([0.0] * before + list([-0.5] * after if logprobs is None else logprobs), dtype=np.float32),
        weight_versions=np.array([NOT_SAMPLED] * before + [version] * after),
        routed_experts=routed_experts,
        model_inputs=model_inputs or {},
    )


def only_sequence(trajectory: Trajectory) -> TokenSequence:
    """Return the sequence of a trajectory that has one."""
    (sequence,) = trajectory.sequences
    return sequence


def sampled_ids(trajectory: Trajectory) -> list[int]:
    """Return the trained tokens of a trajectory of one sequence."""
    found = only_sequence(trajectory)
    ids: list[int] = found.token_ids[found.loss_mask].tolist()
    return ids


def with_tokens(trajectory: Trajectory, *sequences: TokenSequence) -> Trajectory:
    """Return the trajectory with other sequences."""
    return replace(trajectory, sequences=sequences)


def assert_same_trajectories(found: Sequence[Trajectory], expected: Sequence[Trajectory]) -> None:
    """Assert that trajectories are equal in all but the places of their routed experts."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert replace(one, sequences=()) == replace(other, sequences=())
        assert one.num_sequences == other.num_sequences
        for ours, theirs in zip(one.sequences, other.sequences, strict=True):
            for each in fields(TokenSequence):
                if each.name != "routed_experts":
                    ours_of, theirs_of = vars(ours)[each.name], vars(theirs)[each.name]
                    np.testing.assert_array_equal(ours_of, theirs_of, each.name)
            assert (ours.routed_experts is None) == (theirs.routed_experts is None)
