# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What a generation request must fulfil, checked before any rank has begun."""

from nemo_rl_moe.generation.interface import GenerationRequest, SamplingParameters
from nemo_rl_moe.models.megatron import cpu_backend  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig


def check_request(
    request: GenerationRequest, chunk: GPTModel, config: TransformerConfig, max_batch_size: int | None
) -> None:
    """Refuses what the engine cannot do.

    Args:
        request: The request; it may be empty.
        chunk: Any of the model's chunks; holds its sizes.
        config: The model's configuration.
        max_batch_size: Most sequences at a time.

    Raises:
        ValueError: With what was got and what is allowed.
    """
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
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p: got {sampling.top_p}, expected above 0 and at most 1")


def _check_prompts(request: GenerationRequest, chunk: GPTModel) -> None:
    if len(request.prompts) != len(request.seeds):
        raise ValueError(f"got {len(request.prompts)} prompts and {len(request.seeds)} seeds, expected one seed each")
    for index, (prompt, seed) in enumerate(zip(request.prompts, request.seeds, strict=True)):
        if not prompt:
            raise ValueError(f"prompt {index} is empty")
        if min(prompt) < 0 or max(prompt) >= chunk.real_vocabulary_size:
            raise ValueError(f"prompt {index} holds a token outside of 0 to {chunk.real_vocabulary_size - 1}")
        if seed < 0:
            raise ValueError(f"seed {index}: got {seed}, expected 0 or more")
        total = len(prompt) + request.sampling.max_new_tokens
        if total > chunk.max_sequence_length:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; with max_new_tokens {request.sampling.max_new_tokens} that "
                f"is {total}, more than the model's max_total_sequence_length {chunk.max_sequence_length}"
            )
