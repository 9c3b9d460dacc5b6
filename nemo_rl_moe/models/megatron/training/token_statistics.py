# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities, greedy matches and entropies from logits that are cut along the vocabulary."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nemo_rl_moe.models.megatron import cpu_backend  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)

LOGITS_AT_ONCE = 2**24
"""Most float32 logits that exist at a time: 64 MiB."""


class TokenStatistics(NamedTuple):
    """Of each target token: its log-probability in nats, whether it ranks first, and the entropy where asked for."""

    logprobs: Float[Tensor, "rows columns"]
    greedy_matches: Bool[Tensor, "rows columns"] | None
    entropy: Float[Tensor, "rows columns"] | None = None


@contextmanager
def hidden_states_only(chunks: Sequence[Any]) -> Iterator[None]:
    """While open, the model chunks end before the output layer."""
    for chunk in chunks:
        chunk.returns_hidden_states = True
    try:
        yield
    finally:
        for chunk in chunks:
            chunk.returns_hidden_states = False


def token_statistics_in_pieces(
    model: Any,
    hidden_states: Float[Tensor, "local_columns rows hidden"],
    labels: Int[Tensor, "rows columns"],
    temperature: float = 1.0,
    *,
    with_entropy: bool = False,
) -> TokenStatistics:
    """Log-softmax at the labels without ever holding the logits of all tokens.

    Args:
        model: The GPTModel chunk that holds the output layer.
        hidden_states: What it returns under `hidden_states_only`; with sequence parallelism this rank's columns.
        labels: Global token ids.
        temperature: Divides the logits.
        with_entropy: Also the entropy of each token's distribution.
    """
    if model.config.sequence_parallel:
        hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
    shared = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if shared else model.output_layer.weight
    columns = max(1, LOGITS_AT_ONCE // (hidden_states.shape[1] * weight.shape[0]))
    group = parallel_state.get_tensor_model_parallel_group()
    pieces = []
    for hidden, targets in zip(hidden_states.split(columns), labels.T.split(columns), strict=True):
        # Around a bfloat16 model, Megatron-Core turns whatever comes out of it into float32.
        logits = model.mask_logits(torch.nn.functional.linear(hidden.to(weight.dtype), weight)).float()
        logits = logits if temperature == 1.0 else logits / temperature
        found = token_statistics(logits, targets, group)
        pieces.append(found._replace(entropy=vocabulary_entropy(logits, group)) if with_entropy else found)
    return TokenStatistics(
        torch.cat([piece.logprobs for piece in pieces]).T,
        torch.cat([piece.greedy_matches for piece in pieces if piece.greedy_matches is not None]).T,
        torch.cat([piece.entropy for piece in pieces if piece.entropy is not None]).T if with_entropy else None,
    )


def token_statistics(
    logits: Float[Tensor, "rows columns local_vocabulary"],
    labels: Int[Tensor, "rows columns"],
    group: dist.ProcessGroup,
) -> TokenStatistics:
    """Log-softmax at the labels, without gathering the vocabulary.

    Args:
        logits: This tensor-parallel rank's columns of the vocabulary.
        labels: Global token ids.
        group: The tensor-parallel group; rank r holds the r-th block of the vocabulary.
    """
    logits = logits.float()
    local = labels - group.rank() * logits.shape[-1]
    held = (local >= 0) & (local < logits.shape[-1])
    target = logits.gather(-1, local.clamp(0, logits.shape[-1] - 1)[..., None])[..., 0].where(held, 0.0)
    highest = logits.amax(-1)
    _all_reduce(highest, dist.ReduceOp.MAX, group)
    exponentials = (logits - highest[..., None]).exp_().sum(-1)
    _all_reduce(exponentials, dist.ReduceOp.SUM, group)
    _all_reduce(target, dist.ReduceOp.SUM, group)
    return TokenStatistics(target - highest - exponentials.log(), target >= highest)


def _all_reduce(values: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        dist.all_reduce(values, op=operation, group=group)


def vocabulary_entropy(
    logits: Float[Tensor, "rows columns local_vocabulary"], group: dist.ProcessGroup
) -> Float[Tensor, "rows columns"]:
    """Entropy of each row's softmax in nats, differentiable, without gathering the vocabulary.

    `H = log Z - sum_v p_v x_v`, with the logits `x` shifted by their maximum.

    Args:
        logits: This tensor-parallel rank's columns of the vocabulary; the lowest number of their type on padded ones.
        group: The tensor-parallel group.
    """
    logits = logits.float()
    highest = logits.detach().amax(-1, keepdim=True)
    _all_reduce(highest, dist.ReduceOp.MAX, group)
    shifted = logits - highest
    exponentials = shifted.exp()
    # Where a probability is 0 its product with the logit is 0 too, whatever that is.
    weighted = (exponentials * shifted).where(exponentials > 0, 0.0)
    sums = _sum_over_vocabulary(torch.stack([exponentials.sum(-1), weighted.sum(-1)]), group)
    return sums[0].log() - sums[1] / sums[0]


def _sum_over_vocabulary(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over the group whose gradient each rank takes for its own part: all ranks go on with the same sum."""
    if group.size() == 1:
        return values
    return reduce_from_tensor_model_parallel_region(values)
