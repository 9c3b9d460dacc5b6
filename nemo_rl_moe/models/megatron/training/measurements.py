# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Measurements of a forward pass: functions of each microbatch's last hidden states, without gradients.

`MegatronModel.measure` runs them on every rank, and `ModelWorkers` asks for them from the driver. In a result of shape
`[sequences, longest, ...]`, the entry of a token depends on the tokens before it. The first token of a sequence has 0,
and padding any number.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from nemo_rl_moe.models.candidates import CANDIDATE_IDS
from nemo_rl_moe.models.interfaces import Head
from nemo_rl_moe.models.kept_tokens import KEPT_TOKENS
from nemo_rl_moe.models.megatron.training.chunked_head import (
    chunked_token_statistics,
    chunked_top_candidates,
    statistics_of_heads,
)
from nemo_rl_moe.models.megatron.training.microbatch import ModelMicrobatch
from nemo_rl_moe.models.megatron.training.prefix_tree import predecessors_of
from nemo_rl_moe.models.megatron.training.token_statistics import TokenStatistics, score_norms

Result = TypeVar("Result")


@dataclass(frozen=True)
class ForwardResult:
    """The last stage's hidden states of one microbatch.

    Attributes:
        model: The bare model, with its output layer and value head.
        hidden_states: Output of the final norm, `[local columns, rows, hidden]`.
        temperature: Temperature by which logits are divided.
    """

    model: Any
    microbatch: ModelMicrobatch
    hidden_states: Tensor
    temperature: float

    def statistics(self, heads: Collection[Head]) -> TokenStatistics:
        """Return the statistics of the requested heads, in the layout of the microbatch's separate sequences."""
        column, inputs = column_of_candidates(self.microbatch, heads), self.microbatch.inputs
        found = statistics_of_heads(
            self.model,
            self.hidden_states,
            inputs.labels,
            self.temperature,
            heads,
            None if column is None else inputs.model_columns[column],
            predecessors_of(inputs.packed_seq_params),
        )
        statistics = in_layout_of(self.microbatch, found)
        if column == KEPT_TOKENS:
            statistics = statistics.over_kept(self.microbatch.model_columns[KEPT_TOKENS])
        return statistics


Measurement = Callable[[ForwardResult], Result]
"""Function of this module, or a `functools.partial` of one, so that it can be sent to the ranks."""


def token_logprobs(found: ForwardResult) -> Tensor:
    """Return the log-probability of every token given its prefix, in nats, `[sequences, longest]`."""
    return _of_tokens(found.microbatch.per_sequence(found.statistics({Head.LOGPROBS}).logprobs))


def token_score_norms(found: ForwardResult) -> Tensor:
    """Return `score_norms` of every token given its prefix, `[sequences, longest]`."""
    inputs = found.microbatch.inputs
    of_tokens = partial(
        chunked_token_statistics,
        found.model,
        found.hidden_states,
        inputs.labels,
        predecessors=predecessors_of(inputs.packed_seq_params),
    )
    logprobs, sharpened = (of_tokens(found.temperature / divisor).logprobs for divisor in (1, 2))
    norms = in_layout_of(found.microbatch, TokenStatistics(score_norms(logprobs, sharpened), None))
    return _of_tokens(found.microbatch.per_sequence(norms.logprobs))


def prefix_values(found: ForwardResult) -> Tensor:
    """Return the value head's output for every token's prefix, `[sequences, longest]`."""
    return _of_tokens(found.microbatch.per_sequence(_values(found)))


def sequence_scores(found: ForwardResult) -> Tensor:
    """Return the value head's output at each sequence's last token, `[sequences, 1]`."""
    return found.microbatch.at_last_tokens(_values(found))[:, None]


def candidate_logprobs(found: ForwardResult) -> Tensor:
    """Return the log-probabilities of each token's candidates (column `candidate_ids`), `[sequences, longest, k]`."""
    candidates = found.statistics({Head.LOGPROBS, Head.CANDIDATES}).candidates
    assert candidates is not None
    return _of_tokens(found.microbatch.per_sequence(candidates))


def top_candidates(found: ForwardResult, *, k: int, vocabulary_size: int) -> tuple[Tensor, Tensor]:
    """Return the `k` likeliest tokens at each token's position, and their log-probabilities, `[sequences, longest, k]`.

    Only tokens with an id below `vocabulary_size` count.
    """
    ids, logprobs = chunked_top_candidates(found.model, found.hidden_states, found.temperature, k, vocabulary_size)
    microbatch = found.microbatch
    ids, logprobs = (microbatch.per_sequence(microbatch.of_inputs(each)) for each in (ids.to(torch.int32), logprobs))
    return _of_tokens(ids), _of_tokens(logprobs)


def column_of_candidates(microbatch: ModelMicrobatch, heads: Collection[Head]) -> str | None:
    """Return the name of the column with the token ids whose log-probabilities are needed, or None.

    They are the tokens that top-k and top-p kept in sampling, or the candidates that the loss asks for.
    """
    if Head.LOGPROBS in heads and KEPT_TOKENS in microbatch.model_columns:
        return KEPT_TOKENS
    return CANDIDATE_IDS if Head.CANDIDATES in heads else None


def in_layout_of(microbatch: ModelMicrobatch, found: TokenStatistics) -> TokenStatistics:
    """Return a model's statistics in the layout of the microbatch's separate sequences."""
    if microbatch.shared is None:
        return found
    return TokenStatistics(
        microbatch.of_targets(found.logprobs),
        None if found.greedy_matches is None else microbatch.of_targets(found.greedy_matches),
        None if found.entropy is None else microbatch.of_targets(found.entropy),
        None if found.values is None else microbatch.of_inputs(found.values),
        None if found.candidates is None else microbatch.of_targets(found.candidates),
    )


def _values(found: ForwardResult) -> Tensor:
    values = found.statistics({Head.VALUE}).values
    assert values is not None
    return values


def _of_tokens(of_targets: Tensor) -> Tensor:
    """Return `[sequences, targets, ...]` with zeros in front for the first token, which has no prediction."""
    return torch.cat([torch.zeros_like(of_targets[:, :1]), of_targets], dim=1)
