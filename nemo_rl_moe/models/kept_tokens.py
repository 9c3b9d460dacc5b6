# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Kept tokens: the sampling mask of each token. Training replays it.

A sampled token has at most `policy.generation.top_k` kept tokens, with ids of 4 bytes. Like routed experts, the ids go
from the engine to the trainer's ranks through the object store.
"""

from collections.abc import Sequence

from nemo_rl_moe.distributed.batch import StoredColumn, TokenBatch, stored_per_token
from nemo_rl_moe.distributed.stored_rows import StoredRows

KEPT_TOKENS = "kept_tokens"
"""Column for the model, `[batch, sequence, top_k]`: at each position the sampling mask (kept tokens) of the next token.
In a batch with this column, all log-probabilities are normalised over the mask."""
NONE_KEPT = -1
"""Padding after the last kept token. A token that was not sampled has only padding."""


def kept_tokens_column(rows: Sequence[StoredRows | None]) -> StoredColumn | None:
    """Return the column with the sampling masks (kept tokens) of each sequence, or None if no sequence has any."""
    return stored_per_token([None if each is None else each.moved(-1) for each in rows], fill=NONE_KEPT)


def check_kept_tokens(batch: TokenBatch) -> None:
    """Check that each trained token has a sampling mask (kept tokens) if the batch has the column."""
    if KEPT_TOKENS not in batch.columns:
        return
    lacking = batch.token_mask[:, 1:] & (batch.columns[KEPT_TOKENS].values[:, :-1, 0] == NONE_KEPT)
    if count := int(lacking.sum()):
        raise RuntimeError(
            f"loss_fn.sampling_mask: replay: {count} of {batch.num_valid_tokens()} trained tokens have no sampling"
            " mask: the masks were not stored during sampling, or lost with the engine that stored them"
        )
