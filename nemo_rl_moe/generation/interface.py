# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The interface of generation engines: requests in, sequences out, weights from the trainer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from nemo_rl_moe.distributed.batch import Axis, ModelInput
from nemo_rl_moe.distributed.shared_arrays import ArrayStore, SharedArray, SharedColumn
from nemo_rl_moe.distributed.stored_rows import Fetch, RowStore, StoredRows
from nemo_rl_moe.weight_sync.fingerprints import Fingerprints
from nemo_rl_moe.weight_sync.transport import WeightTransport

TokenIds = tuple[int, ...]
TokenSequence = Sequence[int]
Scores = Sequence[Float[np.ndarray, " tokens"]]
"""Log-probabilities, in nats, of all tokens but the first of each sequence."""
ModuleOutputs = Mapping[str, Float[np.ndarray, "tokens features"]]


@dataclass(frozen=True)
class SamplingParameters:
    """Sampling of tokens, in the order of transformers and vLLM: temperature, then top-k, then top-p.

    Attributes:
        max_new_tokens: Maximum length of a response, including its end token.
        temperature: Divides the logits; 0 is greedy.
        stop_token_ids: End tokens. A response ends with the first end token, and includes it.
        stop_strings: Strings that end a response. The response ends with the token that completes one of the
            strings, and includes the token.
        returns_kept_tokens: Whether to return the sampling mask of each token, and log-probabilities over the tokens of
            the mask. Needs top-k, which bounds the size of a mask.
        scores_prompt: Whether to return the log-probabilities of the prompt's tokens. Not all engines can.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    stop_token_ids: TokenIds = ()
    stop_strings: tuple[str, ...] = ()
    returns_kept_tokens: bool = False
    scores_prompt: bool = False

    @property
    def draws_from_a_part(self) -> bool:
        """Whether top-k or top-p may exclude tokens."""
        return self.temperature > 0 and (self.top_k is not None or self.top_p < 1)


@dataclass(frozen=True)
class GenerationRequest:
    """One sequence to continue.

    Attributes:
        seed: Seed of the response, not negative. A response depends only on the weights and its request, not on the
            other requests or on the layout of the engine's ranks.
        model_inputs: Further inputs of the model, such as images.
        place: Index of the trajectory. A batching engine sorts requests by it, so that rounding does not depend on
            their arrival order.
    """

    token_ids: TokenIds
    seed: int
    sampling: SamplingParameters
    model_inputs: Mapping[str, ModelInput] = field(default_factory=dict)
    place: int = field(default=0, compare=False)


@dataclass(frozen=True)
class GenerationBatch:
    """Requests that share their sampling parameters, in the form that is sent to the ranks of an engine.

    Attributes:
        model_inputs: Further inputs of each prompt, such as images; empty if no prompt has any. An array that
            several prompts share, such as the image of a group's samples, is sent once, or is in an object store.
    """

    prompts: tuple[TokenIds, ...]
    seeds: tuple[int, ...]
    sampling: SamplingParameters
    model_inputs: tuple[Mapping[str, ModelInput], ...] = ()

    @staticmethod
    def of(requests: Sequence[GenerationRequest]) -> "GenerationBatch":
        """Return a batch of at least one request. All must share their sampling parameters."""
        inputs = tuple(request.model_inputs for request in requests)
        return GenerationBatch(
            prompts=tuple(request.token_ids for request in requests),
            seeds=tuple(request.seed for request in requests),
            sampling=requests[0].sampling,
            model_inputs=inputs if any(inputs) else (),
        )

    def share(self, rank: int, num_ranks: int) -> "GenerationBatch":
        """Return the prompts of one rank: every `num_ranks`-th, starting at `rank`. May be empty."""
        chosen = slice(rank, None, num_ranks)
        return replace(
            self, prompts=self.prompts[chosen], seeds=self.seeds[chosen], model_inputs=self.model_inputs[chosen]
        )

    def with_shared_in(self, store: ArrayStore) -> "GenerationBatch":
        return self._with_shared(store.place)

    def fetched(self, fetch: Fetch) -> "GenerationBatch":
        """Return the batch with its shared arrays fetched from the object store into memory."""
        return self._with_shared(lambda arrays: SharedColumn(tuple(arrays)).fetched(fetch).arrays)

    def _with_shared(
        self, change: Callable[[Sequence[tuple[SharedArray, ...]]], Sequence[tuple[SharedArray, ...]]]
    ) -> "GenerationBatch":
        """Return the batch with changed shared arrays. `change` gets all arrays of one input."""
        model_inputs = [dict(inputs) for inputs in self.model_inputs]
        shared = (name for inputs in model_inputs for name, each in inputs.items() if each.axis is Axis.SHARED)
        for name in dict.fromkeys(shared):
            having = [inputs for inputs in model_inputs if name in inputs]
            changed = change([tuple(inputs[name].values) for inputs in having])
            for inputs, arrays in zip(having, changed, strict=True):
                inputs[name] = replace(inputs[name], values=arrays)
        return replace(self, model_inputs=tuple(model_inputs))


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of a prompt's tokens after the first, in nats, under the softmax of all logits.

    Attributes:
        logprobs: Log-probability of each token, given the tokens before it.
        top_ids: The likeliest token at the position of each token.
        top_logprobs: Its log-probability.
    """

    logprobs: Float[np.ndarray, " tokens"]
    top_ids: Int[np.ndarray, " tokens"]
    top_logprobs: Float[np.ndarray, " tokens"]


CAPTURED = ("routed_experts", "indexer_positions")
"""Attributes of a generated sequence with the model's choices in the passes over its tokens."""


@dataclass(frozen=True)
class GeneratedSequence:
    """The continuation of one sequence.

    Attributes:
        logprobs: Log-probability of each sampled token, in nats, under the softmax of all logits divided by the
            temperature (1 when greedy), as a training forward with the same temperature computes it. Top-k and top-p do
            not change it, unless `kept_tokens` is returned: then the softmax is over these tokens.
        weight_version: Version (number of optimizer steps) of the weights that sampled the tokens; one for each token
            if weights arrived meanwhile.
        routed_experts: Experts of all tokens of the sequence, prompt included, in each MoE layer, `[moe_layers, topk]`
            int16 for each token, -1 if unknown; None if the engine reports none. The last token was never fed to the
            model, and has none.
        indexer_positions: Positions that all tokens of the sequence see in each layer with an indexer, `[layers, k]`
            int32 for each token, counted from the sequence's start, then -1; None if not requested.
        kept_mass: Total probability of each token's sampling mask; None if top-k and top-p exclude no token, or the
            engine does not report it.
        kept_tokens: Sampling mask of each sampled token, at its position in the full sequence: `[top_k]` int32, padded
            with -1; None if not requested.
        num_cached_tokens: Number of prefix tokens whose keys and values came from a prefix cache; None for an engine
            without one.
        is_partial: Whether the engine was paused before the end. `followed_by` appends the part sampled with other
            weights.
        waited_s: Seconds for which the request was held back, until other requests waited too or weights had arrived.
        prompt_scores: Log-probabilities of the prompt's tokens, if the request asks for them.
    """

    token_ids: Int[np.ndarray, " tokens"]
    logprobs: Float[np.ndarray, " tokens"]
    is_truncated: bool
    weight_version: int | Int[np.ndarray, " tokens"]
    routed_experts: StoredRows | None = None
    indexer_positions: StoredRows | None = None
    kept_mass: Float[np.ndarray, " tokens"] | None = None
    kept_tokens: StoredRows | None = None
    num_cached_tokens: int | None = None
    is_partial: bool = False
    waited_s: float = field(default=0.0, compare=False)
    prompt_scores: PromptScores | None = None

    def followed_by(self, later: "GeneratedSequence") -> "GeneratedSequence":
        """Join this part of a response and its `later` part. Each token keeps its weight version and routes."""
        if not len(self.token_ids):
            return later
        parts = (self, later)
        kept = [part.kept_mass for part in parts if part.kept_mass is not None]
        cached = [part.num_cached_tokens for part in parts if part.num_cached_tokens is not None]
        versions = [np.broadcast_to(np.asarray(part.weight_version), len(part.token_ids)) for part in parts]
        return replace(
            later,
            token_ids=np.concatenate([part.token_ids for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
            weight_version=np.concatenate(versions),
            routed_experts=_joined(self.routed_experts, later.routed_experts),
            indexer_positions=_joined(self.indexer_positions, later.indexer_positions),
            kept_mass=np.concatenate(kept) if len(kept) == len(parts) else None,
            kept_tokens=_joined(self.kept_tokens, later.kept_tokens),
            num_cached_tokens=sum(cached) if cached else None,
            waited_s=self.waited_s + later.waited_s,
            prompt_scores=self.prompt_scores,
        )


def _joined(before: StoredRows | None, later: StoredRows | None) -> StoredRows | None:
    return None if before is None or later is None else before.followed_by(later)


def store_captured(sequences: Sequence[GeneratedSequence], store: RowStore) -> list[GeneratedSequence]:
    """Put the sequences' routed experts and indexers' positions into a store. Return the sequences with references.

    Requires that all sequences or none have them in memory. Without them, the sequences are returned unchanged.
    """
    found = list(sequences)
    for name in CAPTURED:
        rows = [getattr(sequence, name) for sequence in found]
        if None not in rows:
            stored = store.keep([each.pieces[0].source for each in rows])
            changes: list[dict[str, Any]] = [{name: each} for each in stored]
            found = [replace(sequence, **change) for sequence, change in zip(found, changes, strict=True)]
    return found


def store_kept_tokens(sequences: Sequence[GeneratedSequence], store: RowStore) -> list[GeneratedSequence]:
    """Put the sequences' sampling masks (`kept_tokens`) into a store. Return the sequences with references to them."""
    pieces = [sequence.kept_tokens.pieces[0] for sequence in sequences if sequence.kept_tokens is not None]
    if len(pieces) < len(sequences):
        return list(sequences)
    stored = store.keep([piece.source for piece in pieces])
    return [
        replace(sequence, kept_tokens=rows.moved(piece.start))
        for sequence, piece, rows in zip(sequences, pieces, stored, strict=True)
    ]


class GenerationEngine:
    """A generation engine. It takes requests as they come, or pools them (`generation/lockstep.py`).

    Attributes:
        shares_weights: Whether the engine runs the trainer's own weights, which are always current: `update_weights` is
            never called. Otherwise the engine keeps a copy.
        number_format: Format of the engine's weights, such as `bfloat16`; None for the trainer's format.
        can_score: Whether the engine overrides `score`, which the refit check needs.
        repeats_bits: Whether two scorings of the same tokens with the same weights are bitwise equal.
        gives_fingerprints: Whether the engine overrides `weight_fingerprints`.
        gives_module_outputs: Whether the engine overrides `module_outputs`, which explains a failed refit check.
    """

    shares_weights: bool = False
    number_format: str | None = None
    can_score: bool = False
    repeats_bits: bool = True
    gives_fingerprints: bool = False
    gives_module_outputs: bool = False

    async def generate(self, request: GenerationRequest) -> GeneratedSequence:
        """Continue one sequence, and return the continuation.

        Many calls run concurrently in one event loop, so a call must not block the thread. A call may be cancelled. Its
        result is then discarded. An error ends the run.
        """
        raise NotImplementedError

    def update_weights(self, transport: WeightTransport, version: int) -> None:
        """Replace the engine's weights with the trainer's; return when all of them have arrived.

        Raises:
            WeightSyncError: Some tensors did not arrive. The engine must not be used again.
        """
        raise NotImplementedError

    def sleep(self) -> None:
        """Free the memory that only generation needs, and maybe the weights, which `update_weights` sends again."""

    def wake(self) -> None:
        """End `sleep`. `update_weights` may be called before this."""

    def shutdown(self) -> None:
        """Stop all processes that the engine has started."""

    async def pause(self) -> None:
        """Answer all running requests with the tokens so far (`is_partial`). Called in the event loop of the requests.

        An engine that does not override this method completes the requests instead. The caller makes no new request
        until `update_weights` has returned.
        """

    def score(
        self, sequences: Sequence[TokenSequence], temperature: float, *model_inputs: Mapping[str, ModelInput]
    ) -> Sequence[Scores]:
        """Return log-probabilities of all tokens after the first, by each copy of the weights: `[copy][sequence]`.

        `model_inputs` are further inputs of each sequence, such as images; none for text.

        Raises:
            GenerationError: A copy was lost. The next transfer of weights replaces it if the engine can.
        """
        raise NotImplementedError

    def weight_fingerprints(self, number_format: str) -> Sequence[Fingerprints]:
        """Return the fingerprints, in `number_format`, of the tensors that each copy stores: `[copy][name]`.

        Raises as `score` does.
        """
        raise NotImplementedError

    def module_outputs(self, copy: int, token_ids: TokenSequence) -> ModuleOutputs:
        """Return the output of every module of one copy for a sequence, by module name."""
        raise NotImplementedError
