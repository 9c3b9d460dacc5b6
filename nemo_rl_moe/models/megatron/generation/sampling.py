# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Sampling of responses: tokens from logits, cache slots of a batch, stop conditions, and growing responses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nemo_rl_moe.distributed.stored_rows import StoredRows
from nemo_rl_moe.generation.interface import GeneratedSequence, SamplingParameters, TokenIds
from nemo_rl_moe.models.kept_tokens import NONE_KEPT


class SampledTokens(NamedTuple):
    """One sampled token for each row, its log-probability in nats, and the probability mass that top-k and top-p keep.

    The log-probability is over the full vocabulary, before top-k and top-p. But if the ids of the kept tokens are
    returned too (`kept_tokens`, padded with -1), it is over the kept tokens.
    """

    token_ids: Int[Tensor, " rows"]
    logprobs: Float[Tensor, " rows"]
    kept_mass: Float[Tensor, " rows"]
    kept_tokens: Int[Tensor, "rows k"] | None = None


def uniform_numbers(seed: int, count: int) -> Float[np.ndarray, " count"]:
    """Return random numbers in [0, 1) from a seed (Philox). A longer list begins with the numbers of a shorter list."""
    return np.random.Generator(np.random.Philox(key=seed)).random(count)


def truncate(
    probs: Float[Tensor, "rows vocabulary"], top_k: int | None, top_p: float
) -> Float[Tensor, "rows vocabulary"]:
    """Return the probabilities with 0 outside of top-k, and then outside of top-p of the rest, not normalised.

    Of equal probabilities, the token with the lower id is kept.
    """
    vocabulary = probs.shape[-1]
    if (top_k is None or top_k >= vocabulary) and top_p >= 1:
        return probs
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ranked, order = ranked[:, :top_k], order[:, :top_k]
    if top_p < 1:
        up_to = ranked.cumsum(-1, dtype=torch.float64)
        ranked = ranked.where(up_to - ranked < top_p * up_to[:, -1:], 0.0)
    return torch.zeros_like(probs).scatter_(-1, order, ranked)


def draw(weights: Float[Tensor, "rows vocabulary"], uniforms: Float[Tensor, " rows"]) -> Int[Tensor, " rows"]:
    """Return a token for each row: the inverse of the cumulative distribution at the row's number in [0, 1).

    Tokens of weight 0 are never returned.
    """
    # A float32 sum over a large vocabulary would lose rare tokens.
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = cumulative[:, -1:] * uniforms[:, None]
    # The first token whose sum is above the target has a weight above 0. The clamp is needed because parallel sums can
    # round differently from one entry to the next.
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=weights.shape[-1] - 1)


def sample(
    logits: Float[Tensor, "rows vocabulary"], uniforms: Float[Tensor, " rows"], parameters: SamplingParameters
) -> SampledTokens:
    """Sample one token for each row with temperature, then top-k, then top-p. Temperature 0 is greedy."""
    logits = logits.float()
    greedy = parameters.temperature == 0
    if not greedy and parameters.temperature != 1:
        logits = logits / parameters.temperature
    probs = logits.softmax(-1)
    weights = probs if greedy else truncate(probs, parameters.top_k, parameters.top_p)
    token_ids = logits.argmax(-1) if greedy else draw(weights, uniforms)
    kept_mass = probs.new_ones(len(probs)) if weights is probs else weights.sum(-1)
    # A sampled token has a probability above zero, so that its logarithm is finite.
    logprobs = probs.gather(-1, token_ids[:, None])[:, 0].log()
    if not parameters.returns_kept_tokens:
        return SampledTokens(token_ids, logprobs, kept_mass)
    assert parameters.top_k is not None  # checked
    return SampledTokens(token_ids, logprobs - kept_mass.log(), kept_mass, kept_tokens(weights, parameters.top_k))


def kept_tokens(weights: Float[Tensor, "rows vocabulary"], top_k: int) -> Int[Tensor, "rows k"]:
    """Return the ids of the tokens of weight above 0, padded with -1 to `top_k`."""
    largest, ids = weights.topk(min(top_k, weights.shape[-1]))
    ids = ids.where(largest > 0, NONE_KEPT).int()
    return torch.nn.functional.pad(ids, (0, top_k - ids.shape[-1]), value=NONE_KEPT)


@dataclass(frozen=True)
class SlotPlan:
    """Arrangement of a batch of prompts in the slots (token positions) of the key-value cache.

    With padding before shorter prompts, all prompts end at the same slot. Otherwise all prompts begin at the first
    slot. The rest of longer prompts is then fed token by token, while responses to the shorter prompts are sampled.

    Attributes:
        uniforms: Random number for the sampled token of each slot, 0 in slots of a prompt.
        first_sampled: Slot of each row's first sampled token.
        prefill: Number of slots of the first forward pass.
    """

    prompt_tokens: Int[Tensor, "slots rows"]
    uniforms: Float[Tensor, "slots rows"]
    first_sampled: Int[Tensor, " rows"]
    num_pads: Int[Tensor, " rows"] | None
    prefill: int

    def select(self, rows: Int[Tensor, " selected"]) -> "SlotPlan":
        """Return the plan of the sequences with these row indices. An index may occur several times."""
        return SlotPlan(
            prompt_tokens=self.prompt_tokens.index_select(1, rows),
            uniforms=self.uniforms.index_select(1, rows),
            first_sampled=self.first_sampled.index_select(0, rows),
            num_pads=None if self.num_pads is None else self.num_pads.index_select(0, rows),
            prefill=self.prefill,
        )


def plan_slots(
    prompts: Sequence[TokenIds], seeds: Sequence[int], max_new_tokens: int, *, padded: bool, device: torch.device
) -> SlotPlan:
    lengths = np.array([len(prompt) for prompt in prompts])
    longest = int(lengths.max())
    num_pads = longest - lengths if padded else np.zeros_like(lengths)
    first_sampled = num_pads + lengths
    tokens = np.zeros((longest + max_new_tokens, len(prompts)), dtype=np.int64)
    uniforms = np.zeros(tokens.shape)
    for row, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        first = first_sampled[row]
        tokens[num_pads[row] : first, row] = prompt
        uniforms[first : first + max_new_tokens, row] = uniform_numbers(seed, max_new_tokens)
    return SlotPlan(
        prompt_tokens=torch.from_numpy(tokens).to(device),
        uniforms=torch.from_numpy(uniforms).to(device),
        first_sampled=torch.from_numpy(first_sampled).to(device),
        num_pads=torch.from_numpy(num_pads).to(device) if num_pads.any() else None,
        prefill=int(first_sampled.min()),
    )


# Decoding from the middle can garble the first tokens: half a character, or a missing space.
_MARGIN = 8


class StopCondition:
    """Condition that ends a response: an end-of-sequence token or a stop string."""

    def __init__(self, parameters: SamplingParameters, tokenizer: Any):
        if parameters.stop_strings and tokenizer is None:
            raise ValueError("stop_strings need a tokenizer, but this engine has none; use stop_token_ids")
        if not all(parameters.stop_strings):
            raise ValueError("stop_strings: got an empty string, which would end every response at once")
        self._token_ids = np.asarray(parameters.stop_token_ids, dtype=np.int64)
        self._strings = parameters.stop_strings
        self._tokenizer = tokenizer
        # A token has at least one byte.
        self._window = max((len(string.encode()) for string in self._strings), default=0) + _MARGIN

    def ended(
        self, responses: Int[np.ndarray, "rows columns"], lengths: Int[np.ndarray, " rows"]
    ) -> Bool[np.ndarray, " rows"]:
        """Return whether each response ends with its last token. Must be called after every token, to miss no stop."""
        last = responses[np.arange(len(lengths)), np.maximum(lengths, 1) - 1]
        # Faster than numpy's isin for a few numbers.
        found = (last[:, None] == self._token_ids).any(1) & (lengths > 0)
        if self._strings:
            for row in np.flatnonzero(~found & (lengths > 0)):
                end = lengths[row]
                found[row] = self._completes_string(responses[row, max(0, end - self._window) : end].tolist())
        return found

    def _completes_string(self, token_ids: Sequence[int]) -> bool:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(string in text for string in self._strings)


class Responses:
    """Growing responses of a batch. `lengths` has the number of tokens of each response."""

    def __init__(
        self, num_responses: int, max_new_tokens: int, stop: StopCondition, *, reports_kept_mass: bool = False
    ):
        self._kept_mass = np.ones((num_responses, max_new_tokens), dtype=np.float32) if reports_kept_mass else None
        self._token_ids = np.zeros((num_responses, max_new_tokens), dtype=np.int64)
        self._kept_tokens: list[list[Int[np.ndarray, " k"]]] = [[] for _ in range(num_responses)]
        self._logprobs = np.zeros((num_responses, max_new_tokens), dtype=np.float32)
        self.lengths: Int[np.ndarray, " responses"] = np.zeros(num_responses, dtype=np.int64)
        self._stopped = np.zeros(num_responses, dtype=np.bool_)
        self._max_new_tokens = max_new_tokens
        self._stop = stop

    def append(
        self,
        responses: Int[np.ndarray, " rows"],
        token_ids: Int[np.ndarray, " rows"],
        logprobs: Float[np.ndarray, " rows"],
        sampled: Bool[np.ndarray, " rows"],
        kept_mass: Float[np.ndarray, " rows"] | None = None,
        kept_tokens: Int[np.ndarray, "rows k"] | None = None,
    ) -> Bool[np.ndarray, " rows"]:
        """Add a sampled token to each response that has not ended, and return whether each response has ended now.

        Args:
            responses: Index of the response of each row.
            sampled: Whether a row's token was sampled. False for a token of the prompt, which is not added.
        """
        open_rows = sampled & ~self._ended(responses)
        growing = responses[open_rows]
        column = self.lengths[growing]
        self._token_ids[growing, column] = token_ids[open_rows]
        self._logprobs[growing, column] = logprobs[open_rows]
        if self._kept_mass is not None and kept_mass is not None:
            self._kept_mass[growing, column] = kept_mass[open_rows]
        if kept_tokens is not None:
            for response, ids in zip(growing.tolist(), kept_tokens[open_rows], strict=True):
                self._kept_tokens[response].append(ids)
        self.lengths[growing] = column + 1
        self._stopped[growing] = self._stop.ended(self._token_ids[growing], column + 1)
        return self._ended(responses)

    def _ended(self, responses: Int[np.ndarray, " rows"]) -> Bool[np.ndarray, " rows"]:
        ended: Bool[np.ndarray, " rows"] = self._stopped[responses] | (self.lengths[responses] >= self._max_new_tokens)
        return ended

    def sequences(
        self,
        weight_version: int,
        prompt_lengths: Sequence[int] = (),
        captured: Mapping[str, Sequence[Any]] = MappingProxyType({}),
    ) -> list[GeneratedSequence]:
        """Return the finished responses in order.

        Args:
            prompt_lengths: Length of each response's prompt. Only needed if there are kept tokens.
            captured: Attribute of `GeneratedSequence` (`CAPTURED`) -> its value for each response.

        Raises:
            RuntimeError: A log-probability is not finite, because of the weights or the forward pass.
        """
        if not np.isfinite(self._logprobs).all():
            broken = int((~np.isfinite(self._logprobs)).any(axis=1).sum())
            raise RuntimeError(
                f"{broken} of {len(self.lengths)} responses have tokens whose log-probability is NaN or infinite, made"
                f" with the weights after {weight_version} optimizer steps: the model's output is not finite"
            )
        return [
            GeneratedSequence(
                token_ids=self._token_ids[index, :length].copy(),
                logprobs=self._logprobs[index, :length].copy(),
                is_truncated=not self._stopped[index],
                weight_version=weight_version,
                kept_mass=None if self._kept_mass is None else self._kept_mass[index, :length].copy(),
                kept_tokens=StoredRows.of(np.stack(kept)).moved(prompt_lengths[index]) if kept else None,
                **{name: rows[index] for name, rows in captured.items()},
            )
            for index, (length, kept) in enumerate(zip(self.lengths, self._kept_tokens, strict=True))
        ]
