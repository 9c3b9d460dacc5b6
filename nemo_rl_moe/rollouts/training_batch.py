# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The batch of trajectories that a policy is trained with: a row is a sequence, a sample a trajectory."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nemo_rl_moe.distributed.batch import Column, TokenBatch, per_sequence, per_token, stored_per_token
from nemo_rl_moe.models.kept_tokens import KEPT_TOKENS, kept_tokens_column
from nemo_rl_moe.rollouts.trajectory import NOT_SAMPLED, Trajectory, sequences_of, trajectory_of_each_sequence
from nemo_rl_moe.routing.replay import ROUTED_EXPERTS, UNKNOWN
from nemo_rl_moe.token_lag import NO_LAG
from nemo_rl_moe.token_writers import RESULT, TOKEN_WRITERS, token_writers

NO_TURN = -1
"""Number of the turn of a token that no model sampled."""


def loss_masks(trajectories: Sequence[Trajectory]) -> Bool[Tensor, "trajectories tokens"]:
    """Return the tokens of each trajectory that are trained on, truncated ones included: its sequences behind one
    another, and False behind them.
    """
    masks = [np.concatenate([each.loss_mask for each in trajectory.sequences]) for trajectory in trajectories]
    return _padded_masks(masks)


def turns_of_tokens(trajectories: Sequence[Trajectory]) -> Int[Tensor, "trajectories tokens"]:
    """Return the number in time, from 0, of the turn in which each token was sampled; `NO_TURN` on all other tokens.

    Sequences of a trajectory stand behind one another, as in `loss_masks`: a turn is sampled in one of them.
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
    """Return the tokens of each row that are trained on, truncated ones included; False behind a sequence's end."""
    return _padded_masks([sequence.loss_mask for sequence in sequences_of(trajectories)])


def _padded_masks(masks: Sequence[Bool[np.ndarray, " tokens"]]) -> Bool[Tensor, "masks tokens"]:
    padded = torch.zeros(len(masks), max(map(len, masks)), dtype=torch.bool)
    for row, mask in enumerate(masks):
        padded[row, : len(mask)] = torch.as_tensor(mask)
    return padded


def token_lags(trajectories: Sequence[Trajectory], weight_version: int) -> Int[Tensor, "sequences tokens"]:
    """Return the lag of each sampled token behind the weights that are trained; `NO_LAG` on all other tokens.

    Args:
        weight_version: Optimizer steps of the weights that are trained.
    """
    sequences = sequences_of(trajectories)
    lags = torch.full((len(sequences), max(map(len, sequences))), NO_LAG, dtype=torch.int32)
    for row, sequence in enumerate(sequences):
        versions = sequence.weight_versions
        of_tokens = np.where(versions == NOT_SAMPLED, NO_LAG, weight_version - versions)
        lags[row, : len(versions)] = torch.as_tensor(of_tokens)
    return lags


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
        trajectories: In the order of the advantages.
        pad_token_id: What stands after a sequence's end.
        leave_out_truncated: Train on no token of a trajectory that was truncated at a limit (DAPO's overlong
            filtering).
        takes_part: Trajectories that are trained on; of the others no token is. They stay in the batch, so that sizes
            of global batches and microbatches do not depend on what the environment could score. None: all.

    Returns:
        A batch with the columns `advantages`, `generation_logprobs`, the model's inputs, `token_writers` where an
        environment wrote tokens, and, stored, `routed_experts` and `kept_tokens` where an engine reports them.
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
        columns[TOKEN_WRITERS] = _writer_column(writers)
    capture = stored_per_token([sequence.routed_experts for sequence in sequences], fill=UNKNOWN)
    stored = {} if capture is None else {ROUTED_EXPERTS: capture}
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


def _writer_column(writers: Sequence[Int[np.ndarray, " tokens"]]) -> Column:
    values = torch.zeros(len(writers), max(map(len, writers)), dtype=torch.int8)
    for row, of_sequence in enumerate(writers):
        values[row, : len(of_sequence)] = torch.as_tensor(of_sequence)
    return per_token(values)


def tokens_of_trajectories(
    values: Shaped[Tensor, "sequences tokens"], trajectories: Sequence[Trajectory]
) -> Shaped[Tensor, "trajectories tokens"]:
    """Return a value of each token with the sequences of a trajectory behind one another, and 0 behind them."""
    rows = iter(values)
    joined = [torch.cat([next(rows)[: len(each)] for each in trajectory.sequences]) for trajectory in trajectories]
    return pad_sequence(joined, batch_first=True)


def advantage_column(
    advantages: Float[Tensor, "groups generations ..."] | Sequence[Float[Tensor, " tokens"]],
    trajectories: Sequence[Trajectory],
) -> Column:
    """Return advantages as a column of the batch of trajectories.

    Args:
        advantages: One for each trajectory, `[groups, generations]`, which all its sequences get; or one for each token
            of its sequences behind one another, with a third dimension as long as the longest trajectory or as a
            tensor for each trajectory.
        trajectories: In the order of the advantages.
    """
    owners = trajectory_of_each_sequence(trajectories)
    if isinstance(advantages, Tensor):
        advantages = advantages.flatten(0, 1).float()
        if advantages.ndim == 1:
            return per_sequence(advantages[owners])
    sequences = sequences_of(trajectories)
    values = torch.zeros(len(sequences), max(map(len, sequences)))
    row = 0
    for trajectory, of_tokens in zip(trajectories, advantages, strict=True):
        parts = of_tokens[: trajectory.num_tokens].split([len(sequence) for sequence in trajectory.sequences])
        for part in parts:
            values[row, : len(part)] = part
            row += 1
    return per_token(values)
