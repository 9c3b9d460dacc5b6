# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Responses of the tiny model in any layout, and what the training side says of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationBatch, SamplingParameters
from nemo_rl_moe.models.megatron.generation import MegatronGenerator
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from tests.support.tiny_model import parallel_job
from tests.support.training_run import hf_config_of

WEIGHT_VERSION = 3
PROMPT_LENGTHS = (3, 7, 1, 12, 7, 5)
SAMPLING = SamplingParameters(max_new_tokens=11, temperature=0.8, stop_token_ids=(5, 17, 40))


@dataclass(frozen=True)
class GenerationRun:
    """What is generated.

    Attributes:
        policy: The configuration.
        sampling: How.
        shares: Prompts of each data-parallel rank.
        max_batch_size: Most sequences at a time.
        model: Changes to the tiny model, or the name of one of `FAMILY_MODELS`.
    """

    policy: PolicyConfig
    sampling: SamplingParameters = SAMPLING
    shares: Sequence[Sequence[int]] = (tuple(range(len(PROMPT_LENGTHS))),)
    max_batch_size: int | None = None
    model: Mapping[str, Any] | str = field(default_factory=dict)


@dataclass(frozen=True)
class Response:
    """A generated sequence as it crosses processes."""

    token_ids: list[int]
    logprobs: npt.NDArray[np.float32]
    is_truncated: bool


def prompts() -> tuple[tuple[int, ...], ...]:
    """Return the prompts of different lengths."""
    generator = np.random.default_rng(11)
    return tuple(tuple(generator.integers(1, 64, length).tolist()) for length in PROMPT_LENGTHS)


def request_of(indices: Sequence[int], sampling: SamplingParameters = SAMPLING) -> GenerationBatch:
    """Return some of the prompts, each with a seed of its own."""
    every = prompts()
    return GenerationBatch(tuple(every[index] for index in indices), tuple(100 + index for index in indices), sampling)


def build_trainer(policy: PolicyConfig, model: Mapping[str, Any] | str | None = None) -> MegatronTrainer:
    """Return the trainer of this rank, from random weights."""
    return MegatronTrainer(policy, hf_config_of(model or {}), None, num_steps=10)


def generator_of(trainer: MegatronTrainer, tokenizer: Any = None) -> MegatronGenerator:
    """Return an engine on a trainer's weights."""
    return MegatronGenerator(trainer.chunks, trainer.config, tokenizer, trainer.device)


def generate_run(run: GenerationRun) -> dict[int, Response]:
    """Run on every rank of the job; the responses of this rank by the number of their prompt."""
    with parallel_job(run.policy):
        trainer = build_trainer(run.policy, run.model)
        share = run.shares[trainer.coordinates.data_parallel_rank]
        sequences = generator_of(trainer).generate(
            request_of(share, run.sampling), weight_version=WEIGHT_VERSION, max_batch_size=run.max_batch_size
        )
        assert len(sequences) == (len(share) if trainer.coordinates.reports_loss else 0)
        assert all(sequence.weight_version == WEIGHT_VERSION for sequence in sequences)
        return {index: _response(sequence) for index, sequence in zip(share, sequences, strict=False)}


def _response(sequence: GeneratedSequence) -> Response:
    return Response(sequence.token_ids.tolist(), sequence.logprobs, sequence.is_truncated)


def evaluated_logprobs(trainer: MegatronTrainer, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
    """Return what an evaluation forward says of the tokens of a response."""
    tokens = torch.tensor([[*prompt, *response]])
    batch = TokenBatch(tokens, torch.tensor([tokens.shape[1]]), torch.ones_like(tokens, dtype=torch.bool), ("one",))
    return trainer.logprobs([batch])[0][0, len(prompt) :]
