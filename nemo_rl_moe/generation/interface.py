# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Generation engines as an algorithm sees them: requests in, sequences out, weights from the trainer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
        max_new_tokens: Most tokens of a response, its end token included.
        temperature: Divides the logits; 0 takes the token ranked first (greedy).
        stop_token_ids: A response ends with the first of these, which belongs to it.
        stop_strings: A response ends with the token that completes one of these, which belongs to it.
        returns_kept_tokens: With the tokens return what top-k and top-p had left to draw each from, and
            log-probabilities over these; with top-k alone, which bounds their number.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    stop_token_ids: TokenIds = ()
    stop_strings: tuple[str, ...] = ()
    returns_kept_tokens: bool = False

    @property
    def draws_from_a_part(self) -> bool:
        """True where top-k or top-p may leave tokens out."""
        return self.temperature > 0 and (self.top_k is not None or self.top_p < 1)


@dataclass(frozen=True)
class GenerationRequest:
    """One sequence to continue.

    Attributes:
        seed: Not negative. A response depends on the weights, its request and nothing else: neither on the other
            requests nor on the layout of the engine's ranks.
        model_inputs: Further inputs of the model, such as images; empty for text.
        place: Number of the trajectory that asks. An engine that answers requests together takes them in this order,
            whichever came first: sums of a batch depend on it by their rounding.
    """

    token_ids: TokenIds
    seed: int
    sampling: SamplingParameters
    model_inputs: Mapping[str, ModelInput] = field(default_factory=dict)
    place: int = field(default=0, compare=False)


@dataclass(frozen=True)
class GenerationBatch:
    """Requests that share their sampling parameters, as they travel to the ranks of an engine.

    Attributes:
        model_inputs: Further inputs of the model for each prompt, such as images; empty: none has any. Arrays that
            prompts share, as the responses to one prompt do, travel once, or lie in a store.
    """

    prompts: tuple[TokenIds, ...]
    seeds: tuple[int, ...]
    sampling: SamplingParameters
    model_inputs: tuple[Mapping[str, ModelInput], ...] = ()

    @staticmethod
    def of(requests: Sequence[GenerationRequest]) -> "GenerationBatch":
        """Return the batch of some requests, at least one, that share their sampling parameters."""
        inputs = tuple(request.model_inputs for request in requests)
        return GenerationBatch(
            prompts=tuple(request.token_ids for request in requests),
            seeds=tuple(request.seed for request in requests),
            sampling=requests[0].sampling,
            model_inputs=inputs if any(inputs) else (),
        )

    def share(self, rank: int, num_ranks: int) -> "GenerationBatch":
        """Return every `num_ranks`-th prompt, from number `rank` on; maybe none."""
        chosen = slice(rank, None, num_ranks)
        return replace(
            self, prompts=self.prompts[chosen], seeds=self.seeds[chosen], model_inputs=self.model_inputs[chosen]
        )

    def with_shared_in(self, store: ArrayStore) -> "GenerationBatch":
        return self._with_shared(store.place)

    def fetched(self, fetch: Fetch) -> "GenerationBatch":
        """Return the batch with its shared arrays at hand."""
        return self._with_shared(lambda arrays: SharedColumn(tuple(arrays)).fetched(fetch).arrays)

    def _with_shared(
        self, change: Callable[[Sequence[tuple[SharedArray, ...]]], Sequence[tuple[SharedArray, ...]]]
    ) -> "GenerationBatch":
        """Return the batch with other arrays in the place of the shared ones: of all prompts at once, by input."""
        model_inputs = [dict(inputs) for inputs in self.model_inputs]
        shared = (name for inputs in model_inputs for name, each in inputs.items() if each.axis is Axis.SHARED)
        for name in dict.fromkeys(shared):
            having = [inputs for inputs in model_inputs if name in inputs]
            changed = change([tuple(inputs[name].values) for inputs in having])
            for inputs, arrays in zip(having, changed, strict=True):
                inputs[name] = replace(inputs[name], values=arrays)
        return replace(self, model_inputs=tuple(model_inputs))


@dataclass(frozen=True)
class GeneratedSequence:
    """The continuation of one sequence.

    Attributes:
        logprobs: Log-probability of each sampled token, in nats, of the softmax of all logits divided by the
            temperature (1 when greedy): what a training forward with the same temperature computes. Top-k and top-p
            choose among tokens, and change nothing here, except where the kept tokens are returned: over these then.
        weight_version: Optimizer steps of the weights that sampled the tokens; an array where weights arrived
            meanwhile.
        routed_experts: Experts of the whole sequence's tokens in each MoE layer, `[moe_layers, topk]` int16 a token, -1
            where unknown; None where the engine reports none. The last token was never fed to the model, and has none.
        kept_mass: Probability of the tokens together that top-k and top-p left to draw each token from; None where they
            leave out none, or the engine does not report it.
        kept_tokens: Those tokens, `[top_k]` int32 for each sampled token at its place in the whole sequence, -1 behind
            the last; None where nobody asked for them.
        num_cached_tokens: Tokens before these whose keys and values came from a prefix cache; None of an engine without
            one.
        is_partial: The engine was paused before its end: `followed_by` takes what comes under other weights.
        waited_s: Seconds in which the request was held back: until others wait too, or while weights arrive.
    """

    token_ids: Int[np.ndarray, " tokens"]
    logprobs: Float[np.ndarray, " tokens"]
    is_truncated: bool
    weight_version: int | Int[np.ndarray, " tokens"]
    routed_experts: StoredRows | None = None
    kept_mass: Float[np.ndarray, " tokens"] | None = None
    kept_tokens: StoredRows | None = None
    num_cached_tokens: int | None = None
    is_partial: bool = False
    waited_s: float = field(default=0.0, compare=False)

    def followed_by(self, later: "GeneratedSequence") -> "GeneratedSequence":
        """Return this one and its continuation as one sequence; each token keeps the version that sampled it.

        Routed experts of tokens that both computed are those with which they were sampled.
        """
        if not len(self.token_ids):
            return later
        parts = (self, later)
        routes, kept = self.routed_experts, [part.kept_mass for part in parts if part.kept_mass is not None]
        if routes is not None and later.routed_experts is not None:
            routes = routes.followed_by(later.routed_experts)
        kept_tokens = self.kept_tokens
        if kept_tokens is not None and later.kept_tokens is not None:
            kept_tokens = kept_tokens.followed_by(later.kept_tokens)
        cached = [part.num_cached_tokens for part in parts if part.num_cached_tokens is not None]
        versions = [np.broadcast_to(np.asarray(part.weight_version), len(part.token_ids)) for part in parts]
        return replace(
            later,
            token_ids=np.concatenate([part.token_ids for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
            weight_version=np.concatenate(versions),
            routed_experts=routes if later.routed_experts is not None else None,
            kept_mass=np.concatenate(kept) if len(kept) == len(parts) else None,
            kept_tokens=kept_tokens if later.kept_tokens is not None else None,
            num_cached_tokens=sum(cached) if cached else None,
            waited_s=self.waited_s + later.waited_s,
        )


def store_routes(sequences: Sequence[GeneratedSequence], store: RowStore) -> list[GeneratedSequence]:
    """Return the sequences whose routed experts lie in a store instead of travelling with them.

    Args:
        sequences: All with routed experts at hand, or all without.
        store: Takes the rows.
    """
    at_hand = [
        sequence.routed_experts.pieces[0].source for sequence in sequences if sequence.routed_experts is not None
    ]
    if len(at_hand) < len(sequences):
        return list(sequences)
    pairs = zip(sequences, store.keep(at_hand), strict=True)
    return [replace(sequence, routed_experts=rows) for sequence, rows in pairs]


def store_kept_tokens(sequences: Sequence[GeneratedSequence], store: RowStore) -> list[GeneratedSequence]:
    """Return the sequences whose kept tokens lie in a store, as `store_routes` does with routed experts."""
    at_hand = [sequence.kept_tokens.pieces[0] for sequence in sequences if sequence.kept_tokens is not None]
    if len(at_hand) < len(sequences):
        return list(sequences)
    stored = store.keep([piece.source for piece in at_hand])
    return [
        replace(sequence, kept_tokens=rows.moved(piece.start))
        for sequence, piece, rows in zip(sequences, at_hand, stored, strict=True)
    ]


class GenerationEngine:
    """A generation engine. It takes requests as they come, or pools them (`generation/lockstep.py`).

    An engine that sets `can_score`, `gives_fingerprints` or `gives_module_outputs` overrides the method that belongs to
    it.

    Attributes:
        shares_weights: True where it runs the trainer's own weights: they are always current, and `update_weights` is
            never called. False where it keeps a copy.
        number_format: Format of its weights, such as `bfloat16`; None: the trainer's.
        can_score: `score` returns the log-probabilities of given tokens, which the refit check compares.
        repeats_bits: Two scorings of the same tokens by the same weights are equal to the bit.
        gives_fingerprints: `weight_fingerprints` reads the tensors that it stores.
        gives_module_outputs: `module_outputs` explains a failed check.
    """

    shares_weights: bool = False
    number_format: str | None = None
    can_score: bool = False
    repeats_bits: bool = True
    gives_fingerprints: bool = False
    gives_module_outputs: bool = False

    async def generate(self, request: GenerationRequest) -> GeneratedSequence:
        """Continue one sequence.

        Many calls wait at the same time, in one event loop, whose thread none of them may block. A call that is
        cancelled is no longer waited for. An error ends the run.
        """
        raise NotImplementedError

    def update_weights(self, transport: WeightTransport, version: int) -> None:
        """Replace the engine's weights by the trainer's; return when all of them have arrived.

        Raises:
            WeightSyncError: Some did not arrive; the engine must not be used further.
        """
        raise NotImplementedError

    def sleep(self) -> None:
        """Free what only generation needs, when a step's responses are there.

        What weights are freed too, `update_weights` brings again: it follows before the next step's responses.
        """

    def wake(self) -> None:
        """End `sleep`. `update_weights` may come before it."""

    def shutdown(self) -> None:
        """Stop whatever the engine has started."""

    async def pause(self) -> None:
        """Answer all that runs by what there is of it, `is_partial`; in the event loop of its requests.

        A request that cannot be broken off is answered whole, as all are by default. Nobody asks for more before
        `update_weights` is done.
        """

    def score(
        self, sequences: Sequence[TokenSequence], temperature: float, *model_inputs: Mapping[str, ModelInput]
    ) -> Sequence[Scores]:
        """Score each token after the first given those before it, by each copy of the weights: `[copy][sequence]`.

        Args:
            sequences: Of any lengths.
            temperature: Divides the logits.
            model_inputs: Further inputs of each sequence, such as images; none for text.

        Raises:
            GenerationError: A copy was lost. The next transfer of weights replaces it, if the engine can.
        """
        raise NotImplementedError

    def weight_fingerprints(self, number_format: str) -> Sequence[Fingerprints]:
        """Return the fingerprints of the stored tensors of each copy of the weights, `[copy][name]`.

        Raises:
            GenerationError: As `score`.
        """
        raise NotImplementedError

    def module_outputs(self, copy: int, token_ids: TokenSequence) -> ModuleOutputs:
        """Return the output of every module of a copy of the weights for one sequence, by its name in the model."""
        raise NotImplementedError
