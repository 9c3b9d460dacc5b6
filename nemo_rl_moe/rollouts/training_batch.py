# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The training batch of trajectories, in which a row is a sequence and a sample is a trajectory."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nemo_rl_moe.distributed.batch import Column, TokenBatch, per_sequence, per_token, stored_per_token
from nemo_rl_moe.models.kept_tokens import KEPT_TOKENS, kept_tokens_column
from nemo_rl_moe.rollouts.trajectory import NOT_SAMPLED, Trajectory, sequences_of, trajectory_of_each_sequence
from nemo_rl_moe.routing.indexer_replay import INDEXER_POSITIONS
from nemo_rl_moe.routing.replay import ROUTED_EXPERTS, UNKNOWN
from nemo_rl_moe.token_lag import NO_LAG
from nemo_rl_moe.token_writers import RESULT, TOKEN_WRITERS, token_writers

NO_TURN = -1
"""Turn of a token that the model did not sample."""


def loss_masks(trajectories: Sequence[Trajectory]) -> Bool[Tensor, "trajectories tokens"]:
    """Return the loss mask of each trajectory's concatenated sequences, padded with False.

    A truncated trajectory keeps its mask.
    """
    return _padded_masks(
        [np.concatenate([each.loss_mask for each in trajectory.sequences]) for trajectory in trajectories]
    )


def turns_of_tokens(trajectories: Sequence[Trajectory]) -> Int[Tensor, "trajectories tokens"]:
    """Return for each sampled token the index of its turn in order of time, and `NO_TURN` for all other tokens.

    The sequences of a trajectory are concatenated, as in `loss_masks`.
    """
    rows = []
    for trajectory in trajectories:
        is_sampled = np.concatenate([each.weight_versions for each in trajectory.sequences]) != NOT_SAMPLED
        lengths = trajectory.turn_lengths or (int(is_sampled.sum()),)
        row = np.full(len(is_sampled), NO_TURN)
        row[is_sampled] = np.repeat(trajectory.turn_order or np.arange(len(lengths)), lengths)
        rows.append(torch.as_tensor(row))
    return pad_sequence(rows, batch_first=True, padding_value=NO_TURN)


def sampled_tokens(trajectories: Sequence[Trajectory]) -> Bool[Tensor, "sequences tokens"]:
    """Return the loss mask of each sequence, padded with False. Truncated trajectories keep their masks."""
    return _padded_masks([sequence.loss_mask for sequence in sequences_of(trajectories)])


def _padded_masks(masks: Sequence[Bool[np.ndarray, " tokens"]]) -> Bool[Tensor, "masks tokens"]:
    return pad_sequence([torch.as_tensor(mask) for mask in masks], batch_first=True)


def token_lags(trajectories: Sequence[Trajectory], weight_version: int) -> Int[Tensor, "sequences tokens"]:
    """Return the lag (optimizer steps since sampling) of each sampled token as int32, else `NO_LAG`.

    Args:
        weight_version: Version (number of optimizer steps) of the weights that are trained.
    """
    versions = [sequence.weight_versions for sequence in sequences_of(trajectories)]
    lags = [np.where(each == NOT_SAMPLED, NO_LAG, weight_version - each).astype(np.int32) for each in versions]
    return pad_sequence([torch.as_tensor(each) for each in lags], batch_first=True, padding_value=NO_LAG)


def training_batch(
    trajectories: Sequence[Trajectory],
    advantages: Float[Tensor, "groups generations ..."] | Sequence[Float[Tensor, " tokens"]],
    pad_token_id: int,
    *,
    leave_out_truncated: bool,
    takes_part: Bool[Tensor, "groups generations"] | None = None,
) -> TokenBatch:
    """Return the batch of trajectories for the policy-gradient loss.

    Args:
        leave_out_truncated: Whether to leave out trajectories that were truncated at a limit on tokens (DAPO's overlong
            filtering).
        takes_part: Which trajectories are trained on. None for all. The others stay in the batch without trained
            tokens, so that sizes of global batches and microbatches do not depend on failures of the environment.

    Returns:
        A batch with the columns `advantages`, `generation_logprobs`, the model's inputs, and `token_writers` if an
        environment wrote tokens. If the engine reports `routed_experts`, `indexer_positions` and `kept_tokens`, the
        batch has them in its field `stored`.
    """
    sequences, owners = sequences_of(trajectories), trajectory_of_each_sequence(trajectories)
    lengths = [len(sequence) for sequence in sequences]
    shape = (len(sequences), max(lengths))
    input_ids = torch.full(shape, pad_token_id, dtype=torch.long)
    token_mask = torch.zeros(shape, dtype=torch.bool)
    logprobs = torch.zeros(shape)
    trained = [True] * len(trajectories) if takes_part is None else takes_part.reshape(-1).tolist()
    for row, (sequence, owner, length) in enumerate(zip(sequences, owners, lengths, strict=True)):
        input_ids[row, :length] = torch.as_tensor(sequence.token_ids)
        if trained[owner] and not (leave_out_truncated and trajectories[owner].is_truncated):
            token_mask[row, :length] = torch.as_tensor(sequence.loss_mask)
        logprobs[row, :length] = torch.as_tensor(sequence.logprobs)
    columns = {"advantages": advantage_column(advantages, trajectories), "generation_logprobs": per_token(logprobs)}
    writers = [token_writers(sequence.weight_versions != NOT_SAMPLED) for sequence in sequences]
    if any((of_sequence == RESULT).any() for of_sequence in writers):
        columns[TOKEN_WRITERS] = per_token(pad_sequence([torch.as_tensor(each) for each in writers], batch_first=True))
    captured = {
        ROUTED_EXPERTS: [sequence.routed_experts for sequence in sequences],
        INDEXER_POSITIONS: [sequence.indexer_positions for sequence in sequences],
    }
    columns_of = {name: stored_per_token(rows, fill=UNKNOWN) for name, rows in captured.items()}
    stored = {name: column for name, column in columns_of.items() if column is not None}
    if (kept := kept_tokens_column([sequence.kept_tokens for sequence in sequences])) is not None:
        stored[KEPT_TOKENS] = kept
    return TokenBatch(
        input_ids=input_ids,
        lengths=torch.tensor(lengths),
        token_mask=token_mask,
        sample_ids=tuple(trajectories[owner].sample_id for owner in owners),
        columns=columns,
        stored=stored,
        sample_sizes=tuple(trajectory.num_sequences for trajectory in trajectories),
    ).with_inputs([sequence.model_inputs for sequence in sequences])


def tokens_of_trajectories(
    values: Shaped[Tensor, "sequences tokens"], trajectories: Sequence[Trajectory]
) -> Shaped[Tensor, "trajectories tokens"]:
    """Return values of tokens with the sequences of each trajectory concatenated, padded with 0."""
    rows = iter(values)
    joined = [torch.cat([next(rows)[: len(each)] for each in trajectory.sequences]) for trajectory in trajectories]
    return pad_sequence(joined, batch_first=True)


def advantage_column(
    advantages: Float[Tensor, "groups generations ..."] | Sequence[Float[Tensor, " tokens"]],
    trajectories: Sequence[Trajectory],
) -> Column:
    """Return advantages as a column of the trajectories' batch.

    Args:
        advantages: One per trajectory, `[groups, generations]`, for all its sequences. Or one per token of its
            concatenated sequences, as `[groups, generations, tokens]` or as a tensor per trajectory.
    """
    owners = trajectory_of_each_sequence(trajectories)
    if isinstance(advantages, Tensor):
        advantages = advantages.flatten(0, 1).float()
        if advantages.ndim == 1:
            return per_sequence(advantages[owners])
    of_sequences = [
        of_sequence.float()
        for trajectory, of_tokens in zip(trajectories, advantages, strict=True)
        for of_sequence in of_tokens[: trajectory.num_tokens].split([len(each) for each in trajectory.sequences])
    ]
    return per_token(pad_sequence(of_sequences, batch_first=True))
