# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""An engine that is asked a portion at a time, and tells how many responses are there."""

from collections.abc import Callable, Iterator, Sequence

from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationEngine, GenerationRequest
from nemo_rl_moe.weight_sync.transport import WeightTransport


class EngineInPortions:
    """A `GenerationEngine` around another one, whose responses are told as they come.

    A response depends on its request alone, so portions change none. An engine that answers all requests of a call at
    once, such as the trainer's own, tells nothing before the last one otherwise.

    Args:
        engine: Generates.
        portion: Most requests of one call; None: all.
        told: Gets the number of responses so far, over all calls.
    """

    def __init__(self, engine: GenerationEngine, portion: int | None, told: Callable[[int], object]):
        self.shares_weights = engine.shares_weights
        self._engine, self._portion, self._told = engine, portion, told
        self._num_responses = 0

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, GeneratedSequence]]:
        """Continuations of the first portion as they finish, then of the next."""
        size = self._portion or len(requests) or 1
        for start in range(0, len(requests), size):
            for index, sequence in self._engine.generate(requests[start : start + size]):
                self._num_responses += 1
                self._told(self._num_responses)
                yield start + index, sequence

    def update_weights(self, transport: WeightTransport, version: int) -> None:
        """As of the other engine."""
        self._engine.update_weights(transport, version)

    def sleep(self) -> None:
        """As of the other engine."""
        self._engine.sleep()

    def wake(self) -> None:
        """As of the other engine."""
        self._engine.wake()

    def shutdown(self) -> None:
        """As of the other engine."""
        self._engine.shutdown()
