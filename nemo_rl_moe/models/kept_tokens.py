# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Kept tokens: what top-k and top-p left an engine to draw each token from, replayed in training.

For each sampled token there are at most `policy.generation.top_k` ids, in 4 bytes each. They go from the engine to the
trainer's ranks in the object store, like routed experts.
"""

from collections.abc import Sequence

from nemo_rl_moe.distributed.batch import StoredColumn, TokenBatch, stored_per_token
from nemo_rl_moe.distributed.stored_rows import StoredRows

KEPT_TOKENS = "kept_tokens"
"""Column for the model, `[batch, sequence, top_k]`: at each position the kept tokens of the one that is predicted
there. Where a batch has it, all log-probabilities are over the kept tokens."""
NONE_KEPT = -1
"""Id behind the last kept token; all of them: the token was not sampled."""


def kept_tokens_column(rows: Sequence[StoredRows | None]) -> StoredColumn | None:
    """Return the column of the kept tokens of each sequence's tokens; None where no sequence has any."""
    return stored_per_token([None if each is None else each.moved(-1) for each in rows], fill=NONE_KEPT)


def check_kept_tokens(batch: TokenBatch) -> None:
    """Check that each trained token has its kept tokens, in a batch that has the column.

    Raises:
        RuntimeError: Some have none, such as those of an engine that was lost with what it stored.
    """
    if KEPT_TOKENS not in batch.columns:
        return
    lacking = batch.token_mask[:, 1:] & (batch.columns[KEPT_TOKENS].values[:, :-1, 0] == NONE_KEPT)
    if count := int(lacking.sum()):
        raise RuntimeError(
            f"loss_fn.sampling_mask: replay: {count} of {batch.num_valid_tokens()} trained tokens have no kept tokens:"
            " they were sampled without, or lost with the engine that stored them"
        )
