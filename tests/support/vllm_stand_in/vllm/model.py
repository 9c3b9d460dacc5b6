# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Models of the stand-in: a number, or where the folder of the model has a `config.json`, a model of transformers."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nemo_rl_moe.generation.interface import SamplingParameters
from vllm.sampling_params import SamplingParams


class Answer(NamedTuple):
    """Tokens of a finished request, each with its log-probability."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    is_truncated: bool
    prompt_logprobs: Sequence[float] | None = None


class NumberModel:
    """Weights that are one number, that of the first tensor that was loaded; each token is that number."""

    def __init__(self) -> None:
        self.number = 0

    def load(self, tensors: Iterable[tuple[str, Any]]) -> None:
        first, *_ = [tensor for _, tensor in tensors]  # all of them are taken
        self.number = int(first.flatten()[0])

    def answer(self, prompt: Sequence[int], sampling: SamplingParams) -> Answer:
        return Answer([self.number] * sampling.max_tokens, [0.0] * sampling.max_tokens, is_truncated=True)


class TransformersModel:
    """A tiny model that samples and scores as vLLM does; its number is that of the loads so far.

    Args:
        folder: Holds the `config.json`.
        seed: Of the one generator that all requests draw from.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        from tests.support.transformers_engine import TransformersWorker

        self._worker = TransformersWorker(folder)
        self._seeds = torch.Generator().manual_seed(seed)
        self.prompt_temperature = 1.0
        self.number = 0

    def load(self, tensors: Iterable[tuple[str, Any]]) -> None:
        self._worker._load(iter(tensors))
        self.number += 1

    def answer(self, prompt: Sequence[int], sampling: SamplingParams) -> Answer:
        if sampling.prompt_logprobs is not None:
            (scores,) = self._worker.score([prompt], self.prompt_temperature)
            return Answer([0], [0.0], is_truncated=True, prompt_logprobs=[float(score) for score in scores])
        wanted = SamplingParameters(
            sampling.max_tokens, temperature=sampling.temperature, stop_token_ids=tuple(sampling.stop_token_ids)
        )
        seed = int(torch.randint(2**60, (), generator=self._seeds))
        (found,) = self._worker.generate(torch.tensor([prompt]), [seed], wanted, version=0)
        return Answer(found.token_ids.tolist(), found.logprobs.tolist(), found.is_truncated)


def model_of(folder: str, seed: int) -> NumberModel | TransformersModel:
    """Return the model that a folder describes."""
    has_config = (Path(folder) / "config.json").is_file()
    return TransformersModel(Path(folder), seed) if has_config else NumberModel()
