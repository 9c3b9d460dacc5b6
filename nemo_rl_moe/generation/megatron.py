# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Generation by the training workers themselves, with the weights that they train."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from nemo_rl_moe.generation.interface import (
    GeneratedSequence,
    GenerationBatch,
    GenerationRequest,
    SamplingParameters,
)
from nemo_rl_moe.generation.refit import WeightSource
from nemo_rl_moe.weight_sync.transport import WeightTransport

if TYPE_CHECKING:
    from nemo_rl_moe.generation.registry import EngineSetup


class GeneratingPolicy(WeightSource, Protocol):
    """A policy that generates, or sends its weights to who does.

    Attributes:
        model_files: The model's folder without its weights, file name to content.
    """

    model_files: Mapping[str, bytes]

    def generate(self, batch: GenerationBatch) -> Sequence[GeneratedSequence]:
        """One continuation of each prompt, in the order of the prompts."""
        ...


class MegatronGeneration:
    """A `GenerationEngine` without weights of its own.

    Args:
        policy: What is trained; it is started and stopped by others.
    """

    shares_weights = True

    def __init__(self, policy: GeneratingPolicy):
        self._policy = policy

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, GeneratedSequence]]:
        """Continuations, those of requests with the same sampling parameters together and in their order."""
        by_sampling: dict[SamplingParameters, list[int]] = {}
        for index, request in enumerate(requests):
            by_sampling.setdefault(request.sampling, []).append(index)
        for indices in by_sampling.values():
            batch = GenerationBatch.of([requests[index] for index in indices])
            yield from zip(indices, self._policy.generate(batch), strict=True)

    def update_weights(self, transport: WeightTransport, version: int) -> None:
        """Not for this engine: its weights are the policy's.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("the engine shares the trainer's weights: there is nothing to update")

    def sleep(self) -> None:
        """Nothing to free: the key-value cache ends with each batch."""

    def wake(self) -> None:
        """Nothing to do."""

    def shutdown(self) -> None:
        """Nothing to stop: the workers are the policy's."""


def make_engine(setup: "EngineSetup") -> MegatronGeneration:
    """Return the trainer itself as an engine."""
    return MegatronGeneration(setup.policy)
