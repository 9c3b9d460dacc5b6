# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and entropies from hidden states, with logits for one chunk of tokens at a time.

The logits of a microbatch are the largest tensor of a step: 4,096 tokens with a vocabulary of 151,936 are 2.5 GB in
float32, and softmax and gradient need the same again. Here the output layer, softmax and entropy are one node of the
graph. Its forward pass keeps a few numbers per token. Its backward pass recomputes each chunk's logits, which costs one
more product with the output layer's weight. With tensor parallelism, the sums over a rank's columns of the vocabulary
are reduced once for all tokens.

With logits `x` divided by the temperature, probabilities `p`, target `y` and entropy `H`:

    d log p_y / dx_v = [v = y] - p_v        dH / dx_v = -p_v (log p_v + H)

The `k` candidates of a position are additional targets.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from nemo_rl_moe.models.interfaces import OF_VALUES, Head
from nemo_rl_moe.models.megatron.training.token_statistics import (
    LOWEST_LOG_PROBABILITY,
    TokenStatistics,
    VocabularySums,
    local_labels,
    logits_at,
)


@contextmanager
def hidden_states_only(chunks: Sequence[Any]) -> Iterator[None]:
    """Let the model chunks return hidden states, without the output layer, while the context is open."""
    for chunk in chunks:
        chunk.returns_hidden_states = True
    try:
        yield
    finally:
        for chunk in chunks:
            chunk.returns_hidden_states = False


def statistics_of_heads(
    model: Any,
    hidden_states: Float[Tensor, "local_columns rows hidden"],
    labels: Int[Tensor, "rows columns"],
    temperature: float,
    heads: Collection[Head],
    candidate_ids: Int[Tensor, "rows columns k"] | None = None,
    predecessors: Int[Tensor, " columns"] | None = None,
) -> TokenStatistics:
    """Return the statistics of the requested heads from the final norm's output.

    Args:
        candidate_ids: Candidates of the predicted token. An entry -1 is no candidate, and its log-probability has no
            meaning.
        predecessors: For each label, the column whose hidden state predicts it. With None, it is the label's column.
    """
    values = None if OF_VALUES.isdisjoint(heads) else model.value_head(hidden_states)
    if values is not None and Head.LOGPROBS not in heads:
        return TokenStatistics.of_values(values)
    found = chunked_token_statistics(
        model,
        hidden_states,
        labels,
        temperature,
        with_entropy=Head.ENTROPY in heads,
        candidate_ids=candidate_ids,
        predecessors=predecessors,
    )
    return found._replace(values=values)


def chunked_token_statistics(
    model: Any,
    hidden_states: Float[Tensor, "local_columns rows hidden"],
    labels: Int[Tensor, "rows columns"],
    temperature: float = 1.0,
    *,
    with_entropy: bool = False,
    candidate_ids: Int[Tensor, "rows columns k"] | None = None,
    predecessors: Int[Tensor, " columns"] | None = None,
    is_weight_frozen: bool = False,
) -> TokenStatistics:
    """Return the statistics of each target, differentiable with respect to hidden states and output weight.

    The arguments are described in `statistics_of_heads`. With `is_weight_frozen` the weight gets no gradient.
    """
    hidden, weight, head = _inputs_of_head(model, hidden_states, temperature, with_entropy=with_entropy)
    weight = weight.detach() if is_weight_frozen else weight
    rows, columns = labels.shape
    if predecessors is not None:  # a prefix tree is one row
        hidden = hidden.index_select(0, predecessors)
        candidate_ids = None if candidate_ids is None else candidate_ids.index_select(1, predecessors)
    ids = None if candidate_ids is None else candidate_ids.transpose(0, 1).flatten(0, 1).long()
    logprobs, greedy_matches, entropy, candidates = (
        None if values is None else values.unflatten(0, (columns, rows)).transpose(0, 1)
        for values in _ChunkedHead.apply(hidden, weight, labels.T.reshape(-1), ids, head)
    )
    assert logprobs is not None
    return TokenStatistics(logprobs, greedy_matches, entropy, candidates=candidates)


def chunked_top_candidates(
    model: Any,
    hidden_states: Float[Tensor, "local_columns rows hidden"],
    temperature: float,
    k: int,
    vocabulary_size: int,
) -> tuple[Int[Tensor, "rows columns k"], Float[Tensor, "rows columns k"]]:
    """Return the `k` likeliest of the first `vocabulary_size` tokens at each position, and their log-probabilities.

    The likeliest token comes first. Log-probabilities are in nats over the full vocabulary, and have no gradient.
    """
    hidden, weight, head = _inputs_of_head(model, hidden_states, temperature)
    rows = hidden_states.shape[1]
    first = head.group.rank() * weight.shape[0]
    pieces, of_chunks = [], []
    for chunk in head.chunks(len(hidden)):
        logits = head.logits(hidden[chunk], weight)
        named = logits[:, : max(vocabulary_size - first, 0)]
        values, local = named.topk(min(k, named.shape[1]))
        # The gather needs `k` columns from each rank. Padded columns rank last.
        lacking = (0, k - values.shape[1])
        values = torch.nn.functional.pad(values, lacking, value=torch.finfo(values.dtype).min)
        pieces.append((values, torch.nn.functional.pad(local + first, lacking)))
        of_chunks.append(VocabularySums.of_columns(logits, local.new_zeros(len(logits)), head.group))
    values, ids = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    if head.group.size() > 1:
        values, ids = (_of_all_ranks(each, head.group) for each in (values, ids))
        values, columns = values.topk(k)
        ids = ids.gather(-1, columns)
    sums = VocabularySums.joined(of_chunks).of_group(head.group)
    logprobs = values - (sums.highest + sums.exponentials.log())[:, None]
    ids, logprobs = (each.unflatten(0, (-1, rows)).transpose(0, 1) for each in (ids, logprobs))
    return ids, logprobs


def _of_all_ranks(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the concatenated columns of all ranks."""
    found = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(found, values.contiguous(), group=group)
    return torch.cat(found, -1)


def _inputs_of_head(
    model: Any,
    hidden_states: Float[Tensor, "local_columns rows hidden"],
    temperature: float,
    *,
    with_entropy: bool = False,
) -> tuple[Float[Tensor, "tokens hidden"], Float[Tensor, "local_vocabulary hidden"], "_Head"]:
    """Return all tokens' hidden states, the output layer's weight, and the settings of the head."""
    if model.config.sequence_parallel:
        # Each rank has only the gradient from its columns of the vocabulary, so gradients are summed.
        hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=True)
    else:
        hidden_states = copy_to_tensor_model_parallel_region(hidden_states)
    shared = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if shared else model.output_layer.weight
    columns, rows, _ = hidden_states.shape
    head = _Head(
        group=parallel_state.get_tensor_model_parallel_group(),
        mask_logits=model.mask_logits,
        temperature=temperature,
        tokens_at_once=model.logprob_chunk_size or columns * rows,
        with_entropy=with_entropy,
    )
    # Megatron-Core converts the outputs of a bfloat16 model to float32.
    return hidden_states.to(weight.dtype).flatten(0, 1), weight, head


@dataclass(frozen=True)
class _Head:
    group: dist.ProcessGroup
    mask_logits: Callable[[Tensor], Tensor]
    temperature: float
    tokens_at_once: int
    with_entropy: bool

    def chunks(self, num_tokens: int) -> Iterator[slice]:
        for start in range(0, num_tokens, self.tokens_at_once):
            yield slice(start, start + self.tokens_at_once)

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return new logits of a chunk, in float32 or wider. The caller may overwrite them."""
        logits = self.mask_logits(torch.nn.functional.linear(hidden, weight))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)


class _ChunkedHead(torch.autograd.Function):
    """Output layer, log-softmax at labels and candidates, and entropy as one node of the graph."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, candidates: Tensor | None, head: _Head
    ) -> tuple[Tensor | None, ...]:
        """Return the fields of `TokenStatistics` except `values`."""
        of_chunks, of_candidates = [], []
        for chunk in head.chunks(len(labels)):
            logits = head.logits(hidden[chunk], weight)
            if candidates is not None:
                of_candidates.append(logits_at(logits, candidates[chunk], head.group))
            of_chunks.append(
                VocabularySums.of_columns(logits, labels[chunk], head.group, with_entropy=head.with_entropy)
            )
            del logits  # before the next chunk's logits exist
        sums = VocabularySums.joined(of_chunks).of_group(head.group)
        found = sums.statistics()
        ctx.head = head
        ctx.set_materialize_grads(False)
        log_totals = sums.highest + sums.exponentials.log()
        ctx.save_for_backward(hidden, weight, labels, log_totals, found.entropy, candidates)
        assert found.greedy_matches is not None
        ctx.mark_non_differentiable(found.greedy_matches)
        if candidates is None:
            return found.logprobs, found.greedy_matches, found.entropy, None
        at_candidates = torch.cat(of_candidates)
        if head.group.size() > 1:
            dist.all_reduce(at_candidates, group=head.group)
        return found.logprobs, found.greedy_matches, found.entropy, at_candidates.sub_(log_totals[:, None])

    @staticmethod
    def backward(
        ctx: Any, of_logprobs: Tensor | None, _: None, of_entropy: Tensor | None, of_candidates: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the hidden states (this rank's part of the sum) and of the weight."""
        head: _Head = ctx.head
        hidden, weight, labels, log_totals, entropy, candidates = ctx.saved_tensors
        of_logprobs = torch.zeros_like(log_totals) if of_logprobs is None else of_logprobs
        targets, of_targets = labels[:, None], of_logprobs[:, None]
        if of_candidates is not None:
            targets, of_targets = torch.cat([targets, candidates], -1), torch.cat([of_targets, of_candidates], -1)
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if for_hidden else None
        # A sum in bfloat16 would be rounded after each chunk.
        grad_weight = torch.zeros_like(weight, dtype=log_totals.dtype) if for_weight else None
        for chunk in head.chunks(len(labels)):
            of_logits = _gradient_of_logits(
                head.logits(hidden[chunk], weight).sub_(log_totals[chunk, None]),
                targets[chunk],
                head,
                of_targets[chunk],
                None if of_entropy is None else of_entropy[chunk],
                None if of_entropy is None else entropy[chunk],
            ).to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(of_logits, weight, out=grad_hidden[chunk])
            if grad_weight is not None and grad_weight.dtype == weight.dtype:
                grad_weight.addmm_(of_logits.T, hidden[chunk])
            elif grad_weight is not None:
                grad_weight += of_logits.T @ hidden[chunk]
            del of_logits  # before the next chunk's logits exist
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _gradient_of_logits(
    log_probabilities: Float[Tensor, "tokens local_vocabulary"],
    targets: Int[Tensor, "tokens targets"],
    head: _Head,
    of_targets: Float[Tensor, "tokens targets"],
    of_entropy: Float[Tensor, " tokens"] | None,
    entropy: Float[Tensor, " tokens"] | None,
) -> Float[Tensor, "tokens local_vocabulary"]:
    """Return the gradient of the logits before the division by the temperature. Overwrites the log-probabilities."""
    of_targets = of_targets / head.temperature
    total = of_targets.sum(-1, keepdim=True)
    if of_entropy is None or entropy is None:
        gradient = log_probabilities.exp_().mul_(-total)
    else:
        log_probabilities.clamp_(min=LOWEST_LOG_PROBABILITY)
        gradient = log_probabilities.exp().neg_()
        weights = log_probabilities.add_(entropy[:, None]).mul_((of_entropy / head.temperature)[:, None])
        gradient *= weights.add_(total)
    local, held = local_labels(targets, gradient.shape[-1], head.group)
    return gradient.scatter_add_(-1, local, of_targets.where(held, 0.0))
