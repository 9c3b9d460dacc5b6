# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Generation engine on the weights of the training ranks, with Megatron-Core's modules and a key-value cache."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_rl_moe.distributed.stored_rows import StoredRows
from nemo_rl_moe.generation.interface import CAPTURED, GeneratedSequence, GenerationBatch, SamplingParameters
from nemo_rl_moe.models.megatron.generation.forward_passes import ForwardPasses
from nemo_rl_moe.models.megatron.generation.prompt_images import identity_of, input_problem
from nemo_rl_moe.models.megatron.generation.sampling import Responses, StopCondition, plan_slots, sample
from nemo_rl_moe.models.megatron.model.parallel_state import parallel_coordinates
from nemo_rl_moe.models.megatron.training.captured_routes import CapturedRoutes, Capturing
from nemo_rl_moe.models.megatron.training.chunked_head import hidden_states_only


def check_request(
    request: GenerationBatch, chunk: GPTModel, config: TransformerConfig, max_batch_size: int | None
) -> None:
    """Raise a ValueError, before any rank begins, if a request exceeds the engine's limits."""
    if config.context_parallel_size > 1:
        raise ValueError(f"generation needs context_parallel_size 1, got {config.context_parallel_size}")
    if max_batch_size is not None and max_batch_size < 1:
        raise ValueError(f"max_batch_size: got {max_batch_size}, expected at least 1")
    _check_sampling(request.sampling)
    _check_prompts(request, chunk)


def _check_sampling(sampling: SamplingParameters) -> None:
    if sampling.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: got {sampling.max_new_tokens}, expected at least 1")
    if sampling.temperature < 0:
        raise ValueError(f"temperature: got {sampling.temperature}, expected 0 (greedy) or more")
    if sampling.top_k is not None and sampling.top_k < 1:
        raise ValueError(f"top_k: got {sampling.top_k}, expected at least 1, or None for all tokens")
    if sampling.returns_kept_tokens and sampling.top_k is None:
        raise ValueError("top_k: got None, but returns_kept_tokens needs a number, which limits the kept tokens")
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p: got {sampling.top_p}, expected above 0 and at most 1")


def _check_prompts(request: GenerationBatch, chunk: GPTModel) -> None:
    if len(request.prompts) != len(request.seeds):
        raise ValueError(f"got {len(request.prompts)} prompts and {len(request.seeds)} seeds, expected one seed each")
    if len(request.model_inputs) not in (0, len(request.prompts)):
        raise ValueError(
            f"got {len(request.prompts)} prompts, but model inputs for {len(request.model_inputs)} prompts: "
            "expected inputs for none or for all"
        )
    for index, inputs in enumerate(request.model_inputs):
        if problem := input_problem(inputs, chunk, len(request.prompts[index])):
            raise ValueError(f"prompt {index} {problem}")
    for index, (prompt, seed) in enumerate(zip(request.prompts, request.seeds, strict=True)):
        if not prompt:
            raise ValueError(f"prompt {index} is empty")
        if min(prompt) < 0 or max(prompt) >= chunk.real_vocabulary_size:
            raise ValueError(f"prompt {index} holds a token id outside of 0 to {chunk.real_vocabulary_size - 1}")
        if seed < 0:
            raise ValueError(f"seed {index}: got {seed}, expected 0 or more")
        total = len(prompt) + request.sampling.max_new_tokens
        if total > chunk.max_sequence_length:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; with max_new_tokens {request.sampling.max_new_tokens} that "
                f"is {total}, more than the model's max_total_sequence_length {chunk.max_sequence_length}"
            )


# Attributes of Megatron-Core's modules that switch on sequence parallelism.
_SEQUENCE_PARALLEL = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")


@contextmanager
def inference(
    chunks: Sequence[GPTModel], config: TransformerConfig, device: torch.device, *, own_forward: bool
) -> Iterator[None]:
    """Put the chunks into inference mode: evaluation, hidden states as output, no sequence parallelism.

    At the end everything is restored, including random states, except that the chunks stay in evaluation mode.

    Args:
        own_forward: Whether `CachedForward` runs the passes, not Megatron-Core's modules.
    """
    for chunk in chunks:
        chunk.eval()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        stack.enter_context(_kept_random_states())
        stack.enter_context(_without_sequence_parallelism(chunks, config))
        stack.enter_context(hidden_states_only(chunks))
        stack.enter_context(torch.inference_mode() if own_forward else torch.no_grad())
        yield


@contextmanager
def _kept_random_states() -> Iterator[None]:
    """Restore Megatron-Core's random states at the end. A router's input noise, for example, uses them."""
    tracker = get_cuda_rng_tracker()
    states = {name: state.clone() for name, state in tracker.get_states().items()}
    try:
        yield
    finally:
        tracker.set_states(states)


@contextmanager
def _without_sequence_parallelism(chunks: Sequence[GPTModel], config: TransformerConfig) -> Iterator[None]:
    """Switch off sequence parallelism, because a single token cannot be split among ranks."""
    # Megatron-Core's function for this caches modules by the address of their model, so a later model at the same
    # address would get the modules of the first model.
    modules = [module for chunk in chunks for module in chunk.modules()]
    changed = [
        (owner, name) for owner in (config, *modules) for name in _SEQUENCE_PARALLEL if getattr(owner, name, False)
    ]
    try:
        for owner, name in changed:
            setattr(owner, name, False)
        yield
    finally:
        for owner, name in changed:
            setattr(owner, name, True)


LEAVE_SHARE = 0.1
"""Fraction of a batch's sequences that must have ended before they are dropped from the key-value cache, because each
drop copies the cache."""


class MegatronGenerator:
    """Generation engine of a rank. It works together with the ranks that hold the other parts of the model."""

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        config: TransformerConfig,
        tokenizer: Any,
        device: torch.device,
        routers: Capturing | None = None,
        indexers: Capturing | None = None,
    ):
        self._chunks, self._config, self._device = chunks, config, device
        self._capturing = {name: each for name, each in zip(CAPTURED, (routers, indexers), strict=True) if each}
        self._tokenizer = tokenizer
        self._coordinates = parallel_coordinates()
        self._passes = ForwardPasses(chunks, config, device)
        group = parallel_state.get_model_parallel_group()
        self._model_parallel = group if group.size() > 1 else None
        self._sampling_rank = dist.get_process_group_ranks(group)[-config.tensor_model_parallel_size]

    def generate(
        self, request: GenerationBatch, *, weight_version: int, max_batch_size: int | None = None
    ) -> list[GeneratedSequence]:
        """Generate one response for each prompt, in the order of the prompts.

        Every rank of the job calls it. Ranks with the same data-parallel rank pass the same request, which may be
        empty. The model is left in evaluation mode.

        Returns:
            The responses on tensor-parallel rank 0 of the last pipeline stage, and an empty list on other ranks.

        Raises:
            ValueError: The request is invalid. Raised before any generation.
        """
        check_request(request, self._chunks[0], self._config, max_batch_size)
        stop = StopCondition(request.sampling, self._tokenizer)
        sequences: dict[int, GeneratedSequence] = {}
        with inference(self._chunks, self._config, self._device, own_forward=self._passes.padded):
            with ExitStack() as shown:
                for each in self._capturing.values():
                    shown.enter_context(each.hooks.shown())
                for batch in _batches(request, max_batch_size):
                    responses, captured = self._run(request, batch, stop)
                    rows = {name: self._rows(request, batch, responses, name, each) for name, each in captured.items()}
                    prompt_lengths = [len(request.prompts[index]) for index in batch]
                    found = responses.sequences(weight_version, prompt_lengths, rows)
                    sequences |= zip(batch, found, strict=True)
            # Outside of `shown`, so that no hook records these routes.
            self._passes.wait_for_peers()
        return [sequences[index] for index in range(len(sequences))] if self._coordinates.reports_loss else []

    def _run(
        self, request: GenerationBatch, batch: Sequence[int], stop: StopCondition
    ) -> tuple[Responses, dict[str, CapturedRoutes]]:
        """Generate responses to a batch of prompts, and capture what routers and indexers with hooks choose."""
        parameters = request.sampling
        plan = plan_slots(
            [request.prompts[index] for index in batch],
            [request.seeds[index] for index in batch],
            parameters.max_new_tokens,
            padded=self._passes.padded,
            device=self._device,
        )
        responses = Responses(
            len(batch), parameters.max_new_tokens, stop, reports_kept_mass=parameters.draws_from_a_part
        )
        firsts, copies = _distinct_prompts(request, batch)
        copies_on_device = torch.tensor(copies, device=self._device) if len(firsts) < len(batch) else None
        prefill = plan if copies_on_device is None else plan.select(torch.tensor(firsts, device=self._device))
        inputs_of_rows = [request.model_inputs[batch[row]] for row in firsts] if request.model_inputs else []
        cached = self._passes.new_batch(len(firsts), len(plan.prompt_tokens), prefill.num_pads, inputs_of_rows)
        rows, first_sampled = np.arange(len(batch)), plan.first_sampled.cpu().numpy()
        captured = {
            name: CapturedRoutes(each.hooks, each.topk, self._device, each.dtype)
            for name, each in self._capturing.items()
        }
        inputs, last_prompt = prefill.prompt_tokens[: plan.prefill].t(), first_sampled.max()
        while True:
            first_slot = cached.num_filled
            logits = self._passes.logits(inputs, cached)
            slot = cached.num_filled
            for each in captured.values():
                each.add(slot - first_slot, rows, copies_on_device)
            if copies_on_device is not None:
                # The first pass ran each distinct prompt once. From here on, every sequence has its own row.
                logits = None if logits is None else logits.index_select(0, copies_on_device)
                cached.select_rows(copies_on_device)
                copies_on_device = None
            chosen, kept_tokens = self._choose(logits, plan.uniforms[slot], parameters)
            token_ids, logprobs, kept_mass = chosen.cpu().numpy()
            kept_ids = None if kept_tokens is None else kept_tokens.cpu().numpy()
            ended = responses.append(
                rows, token_ids.astype(np.int64), logprobs, slot >= first_sampled, kept_mass, kept_ids
            )
            inputs = chosen[0].long()
            if slot < last_prompt:
                inputs = torch.where(plan.first_sampled > slot, plan.prompt_tokens[slot], inputs)
            num_ended = np.count_nonzero(ended)
            if num_ended == len(rows):
                return responses, captured
            if num_ended >= LEAVE_SHARE * len(rows):
                rows, first_sampled = rows[~ended], first_sampled[~ended]
                kept = torch.from_numpy(np.flatnonzero(~ended)).to(self._device)
                plan, inputs = plan.select(kept), inputs[kept]
                cached.select_rows(kept)
            inputs = inputs[:, None]

    def _rows(
        self, request: GenerationBatch, batch: Sequence[int], responses: Responses, name: str, captured: CapturedRoutes
    ) -> list[StoredRows]:
        """Return the captured rows of each sequence's tokens, except the last token, which was never an input."""
        prompts = np.array([len(request.prompts[index]) for index in batch])
        first_slots = prompts.max() - prompts if self._passes.padded else np.zeros_like(prompts)
        num_fed = prompts + responses.lengths - 1
        stages = self._capturing[name].stages
        return [StoredRows.of(rows) for rows in captured.sequences(stages, first_slots, num_fed)]

    def _choose(
        self, logits: Float[Tensor, "rows vocabulary"] | None, uniforms: Float[Tensor, " rows"], how: SamplingParameters
    ) -> tuple[Float[Tensor, "3 rows"], Int[Tensor, "rows k"] | None]:
        """Sample tokens on one rank for all ranks.

        Returns:
            Token ids, log-probabilities, and the probability mass that top-k and top-p keep. Then the ids of the kept
            tokens, on the sampling rank if the request asks for them, otherwise None.
        """
        # Separate samples could diverge, because rounding can differ between ranks. Kept tokens stay on the sampling
        # rank, which returns the sequences.
        if logits is not None and self._coordinates.reports_loss:
            # One tensor needs one copy to the host and one broadcast. float64 represents all numbers exactly.
            found = sample(logits, uniforms, how)
            kept_tokens = found.kept_tokens
            chosen = torch.stack([each.double() for each in (found.token_ids, found.logprobs, found.kept_mass)])
        else:
            kept_tokens = None
            chosen = torch.empty(3, len(uniforms), dtype=torch.float64, device=self._device)
        if self._model_parallel is not None:
            dist.broadcast(chosen, src=self._sampling_rank, group=self._model_parallel)
        return chosen, kept_tokens


def _distinct_prompts(request: GenerationBatch, batch: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the first row with each distinct prompt of a batch, and for each row the index of its prompt in them."""
    numbers: dict[Hashable, int] = {}
    firsts: list[int] = []
    copies: list[int] = []
    for row, index in enumerate(batch):
        images = identity_of(request.model_inputs[index]) if request.model_inputs else ()
        number = numbers.setdefault((tuple(request.prompts[index]), images), len(firsts))
        if number == len(firsts):
            firsts.append(row)
        copies.append(number)
    return firsts, copies


def _batches(request: GenerationBatch, max_batch_size: int | None) -> list[list[int]]:
    """Return the indices of the prompts of each batch. Batches have prompts of similar length, the longest first."""
    order = sorted(range(len(request.prompts)), key=lambda index: -len(request.prompts[index]))
    size = max_batch_size or max(len(order), 1)
    return [order[first : first + size] for first in range(0, len(order), size)]
