# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Generation by the training workers themselves, with the weights that they train."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest


class GeneratingPolicy(Protocol):
    """A policy whose workers can generate."""

    def generate(self, request: GenerationRequest) -> Sequence[GeneratedSequence]:
        """One response for each prompt, in the order of the prompts."""
        ...


class MegatronGeneration:
    """A `GenerationInterface` without weights of its own.

    Args:
        policy: What is trained; it is started and stopped by others.
    """

    shares_weights = True

    def __init__(self, policy: GeneratingPolicy):
        self._policy = policy

    def generate(self, request: GenerationRequest) -> Sequence[GeneratedSequence]:
        """One response for each prompt, in the order of the prompts."""
        return self._policy.generate(request)

    def refit(self, weights: Iterable[tuple[str, Tensor]], weight_version: int) -> None:
        """Not for this engine: its weights are the policy's.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("the engine shares the trainer's weights: there is nothing to refit")

    def shutdown(self) -> None:
        """Does nothing: the workers are the policy's."""
