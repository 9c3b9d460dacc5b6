# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The batch container that travels from the data loader over Ray to the workers."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class TokenBatch:
    """Right-padded token sequences with the mask that says which tokens are trained on.

    Attributes:
        input_ids: Token ids; what stands after a sequence's length is padding.
        lengths: Number of real tokens of each sequence.
        token_mask: True where a token counts in the loss *as a target* (position `t` is predicted
            from position `t - 1`); False on prompts and padding.
        sample_ids: Where each sequence came from, for error messages.
        extras: Further tensors: `[batch]`, or `[batch, sequence]` with one value for each token.
        group_size: So many neighbours always run in the same microbatch; `policy.train_global_batch_size` and
            `policy.train_micro_batch_size` count such groups.
    """

    input_ids: Int[Tensor, "batch sequence"]
    lengths: Int[Tensor, " batch"]
    token_mask: Bool[Tensor, "batch sequence"]
    sample_ids: tuple[str, ...]
    extras: dict[str, Tensor] = field(default_factory=dict)
    group_size: int = 1

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def select(self, indices: Sequence[int]) -> "TokenBatch":
        """The sequences at `indices` (whole groups), in that order, cut to the longest of them."""
        index = torch.as_tensor(indices, dtype=torch.long)
        longest = int(self.lengths[index].max()) if len(index) else 0
        return TokenBatch(
            input_ids=self.input_ids[index, :longest],
            lengths=self.lengths[index],
            token_mask=self.token_mask[index, :longest],
            sample_ids=tuple(self.sample_ids[i] for i in indices),
            extras={
                name: value[index, :longest] if value.shape[1:2] == self.input_ids.shape[1:2] else value[index]
                for name, value in self.extras.items()
            },
            group_size=self.group_size,
        )

    def num_valid_tokens(self) -> int:
        """How many tokens count in the loss. The first token of a sequence has no prediction and never counts."""
        return int(self.token_mask[:, 1:].sum())


@dataclass(frozen=True)
class GlobalBatchShard:
    """One data-parallel rank's part of one global batch.

    Attributes:
        microbatches: In the order in which they run; every rank has as many.
        global_valid_tokens: Targets that count in the loss, over all ranks.
        global_sequences: Sequences that hold such a target, over all ranks.
    """

    microbatches: tuple[TokenBatch, ...]
    global_valid_tokens: int
    global_sequences: int


def count_trained_sequences(batch: TokenBatch) -> int:
    """Number of sequences with at least one token that counts in the loss."""
    return int(batch.token_mask[:, 1:].any(dim=1).sum())


def make_shard(batch: TokenBatch, microbatches: Sequence[Sequence[int]], totals: TokenBatch) -> GlobalBatchShard:
    """Cuts one rank's microbatches out of a batch.

    Args:
        batch: The batch that the indices refer to.
        microbatches: Indices of each microbatch's sequences.
        totals: The whole global batch that the loss is normalised by.
    """
    return GlobalBatchShard(
        microbatches=tuple(batch.select(indices) for indices in microbatches),
        global_valid_tokens=totals.num_valid_tokens(),
        global_sequences=count_trained_sequences(totals),
    )


def append_fillers(batch: TokenBatch, fillers: Sequence[int]) -> TokenBatch:
    """The batch with some of its sequences once more at its end, none of whose tokens count in the loss.

    Args:
        batch: The batch.
        fillers: Indices of the sequences to repeat, as `EvaluationPlan.fillers` lists them.
    """
    if not fillers:
        return batch
    filled = batch.select([*range(len(batch)), *fillers])
    token_mask = filled.token_mask.clone()
    token_mask[len(batch) :] = False
    return replace(filled, token_mask=token_mask)
