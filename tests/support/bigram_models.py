# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A language model that is a table: the logits of the next token by the present one, as a model of a run is asked."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.models.candidates import CANDIDATE_IDS, Candidates


@dataclass
class BigramModel:
    """Answers as the workers of a model do.

    Attributes:
        logits: Row by the present token, column by the next one.
        asked: Batches that it has seen.
    """

    logits: Float[Tensor, "vocabulary vocabulary"]
    asked: list[TokenBatch] = field(default_factory=list)

    def next_logprobs(self, batch: TokenBatch) -> Float[Tensor, "batch targets vocabulary"]:
        """Log-probabilities of all tokens in the place of each one but the first."""
        return self.logits[batch.input_ids[:, :-1]].log_softmax(-1)

    def start_logprobs(self, batch: TokenBatch) -> Callable[[], Tensor]:
        self.asked.append(batch)
        found = self.next_logprobs(batch).gather(-1, batch.input_ids[:, 1:, None])[..., 0]
        return lambda: pad(found, (1, 0))

    def start_candidate_logprobs(self, batch: TokenBatch) -> Callable[[], Tensor]:
        self.asked.append(batch)
        ids = batch.columns[CANDIDATE_IDS].values[:, :-1]  # where they are predicted
        found = self.next_logprobs(batch).gather(-1, ids.long())
        return lambda: pad(found, (0, 0, 1, 0))

    def start_top_candidates(self, batch: TokenBatch, k: int, vocabulary_size: int) -> Callable[[], Candidates]:
        self.asked.append(batch)
        values, ids = self.next_logprobs(batch)[..., :vocabulary_size].topk(k)
        return lambda: Candidates(pad(ids, (0, 0, 1, 0)).to(torch.int32), pad(values, (0, 0, 1, 0)))

    def prepare_for_logprobs(self, clock: PhaseClock) -> None:
        """Do nothing."""
