# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Preference pairs for a reward model: each sequence up to the token at which its score is taken."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Int

from nemo_rl_moe.data.chat import TokenizedExample
from nemo_rl_moe.data.preferences import PreferencePair, collate_pairs
from nemo_rl_moe.distributed.batch import TokenBatch


def scored_length(token_ids: Int[np.ndarray, " tokens"], pad_token_id: int | None) -> int:
    """Return the number of tokens up to the one at which a sequence classifier takes the score of a sequence.

    As in transformers, it is the last token that is not padding, or the first one if all are padding.

    Args:
        pad_token_id: Padding token in the classifier's configuration. None: the score is taken at the last token.
    """
    if pad_token_id is None:
        return len(token_ids)
    positions = np.flatnonzero(token_ids != pad_token_id)
    return int(positions[-1]) + 1 if len(positions) else 1


def up_to_score(example: TokenizedExample, pad_token_id: int | None) -> TokenizedExample:
    """Return a conversation up to the token of its score, which ends the last turn of the assistant.

    Text that the chat template writes after this turn, such as a line break, is dropped, because a sampled response
    ends before it. The token of the score always counts as trained.

    Args:
        pad_token_id: See `scored_length`.
    """
    ends = np.flatnonzero(example.token_mask)
    length = scored_length(example.input_ids[: ends[-1] + 1 if len(ends) else None], pad_token_id)
    token_mask = example.token_mask[:length].copy()
    token_mask[-1] = True
    return replace(example, input_ids=example.input_ids[:length], token_mask=token_mask)


def collate_scored_pairs(
    pairs: Sequence[PreferencePair], pad_token_id: int, *, scored_pad_token_id: int | None
) -> TokenBatch:
    """Return `collate_pairs` of sequences that end with the token of their score.

    Args:
        scored_pad_token_id: `pad_token_id` of `scored_length`. The other padding token only fills the batch.
    """
    cut = [
        replace(
            pair,
            chosen=up_to_score(pair.chosen, scored_pad_token_id),
            rejected=up_to_score(pair.rejected, scored_pad_token_id),
        )
        for pair in pairs
    ]
    return collate_pairs(cut, pad_token_id)
