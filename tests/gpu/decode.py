# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Generation by the trainer's own engine, with each attention of Transformer Engine: seconds a token.

What the environment says of attention is fixed once in a process: each attention has a check of its own.
"""

from collections.abc import Iterator

import torch

from nemo_rl_moe.generation.interface import GenerationBatch, SamplingParameters
from tests.gpu.models import Failed, Numbers, run_config, slice_config, timed, weights_from_the_device
from tests.gpu.process import job_of_one

NUM_TOKENS, PROMPT_TOKENS, ROWS = 200, 128, 32


def auto(*, rehearse: bool) -> Iterator[Numbers]:
    """Decoding with the attention that Transformer Engine chooses."""
    return _decode("auto", rehearse=rehearse)


def flash(*, rehearse: bool) -> Iterator[Numbers]:
    """Decoding with flash-attn, which plans nothing for each length."""
    return _decode("flash", rehearse=rehearse)


def fused(*, rehearse: bool) -> Iterator[Numbers]:
    """Decoding with cuDNN's attention, which plans a graph for each length."""
    return _decode("fused", rehearse=rehearse)


def unfused(*, rehearse: bool) -> Iterator[Numbers]:
    """Decoding with torch's matrix products, which plan nothing."""
    return _decode("unfused", rehearse=rehearse)


def _decode(backend: str, *, rehearse: bool) -> Iterator[Numbers]:
    """Yield the numbers of tokens behind prompts: on a GPU keys have 128 to 328 places."""
    num_tokens, prompt, rows = (6, 4, 2) if rehearse else (NUM_TOKENS, PROMPT_TOKENS, ROWS)
    override = {} if rehearse else {"megatron_cfg__model_overrides": f"{{attention_backend: {backend}}}"}
    config, hf_config = run_config(rehearse=rehearse, **override), slice_config(rehearse=rehearse)
    with job_of_one(config.policy), weights_from_the_device():
        from nemo_rl_moe.models.megatron.training.megatron_model import MegatronModel

        model = MegatronModel(config.policy, hf_config, None)
        tokens = torch.randint(1, hf_config.vocab_size, (rows, prompt), generator=torch.Generator().manual_seed(0))
        request = GenerationBatch(
            tuple(tuple(row) for row in tokens.tolist()), tuple(range(rows)), SamplingParameters(num_tokens)
        )
        # Twice: plans that are kept between the two show as the difference.
        (first, _), (second, made) = (timed(model.generate, request, None) for _ in range(2))
    numbers = {
        "attention_backend": backend,
        "first_seconds_per_token": round(first / num_tokens, 5),
        "second_seconds_per_token": round(second / num_tokens, 5),
        "tokens_per_second": round(rows * num_tokens / second, 1),
    }
    if any(len(sequence.token_ids) != num_tokens for sequence in made):
        raise Failed(f"a response has fewer than {num_tokens} tokens", numbers)
    yield numbers
