# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""vLLM engines that outlive runs: a run borrows one, which gets its weights as from any run's start."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nemo_rl_moe.distributed.batch import ModelInput
from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.generation.interface import (
    GeneratedSequence,
    GenerationEngine,
    GenerationRequest,
    Scores,
    TokenSequence,
)
from nemo_rl_moe.generation.registry import EngineSetup
from nemo_rl_moe.generation.vllm.engine import VllmEngine, make_vllm_engine
from nemo_rl_moe.generation.vllm.record import number_format
from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy
from nemo_rl_moe.weight_sync.transport import WeightTransport


class PresentPolicy:
    """The policy of the run that borrows the engine now, from which a replaced engine gets its weights.

    Args:
        policy: Of the first run.

    Attributes:
        policy: Of the present one.
    """

    def __init__(self, policy: Any):
        self.policy: MegatronPolicy = policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)


class LentEngine(GenerationEngine):
    """The engine of one run, after whose end the engines live on.

    Args:
        engine: What does the work.
    """

    can_score = True

    def __init__(self, engine: VllmEngine):
        self._engine = engine
        self.number_format = engine.number_format

    async def generate(self, request: GenerationRequest) -> GeneratedSequence:
        """Continue one sequence."""
        return await self._engine.generate(request)

    def score(
        self, sequences: Sequence[TokenSequence], temperature: float, *model_inputs: Mapping[str, ModelInput]
    ) -> Sequence[Scores]:
        """Score as `VllmEngine` does."""
        return self._engine.score(sequences, temperature, *model_inputs)

    def update_weights(self, transport: WeightTransport, version: int) -> None:
        """Update the weights as `VllmEngine` does."""
        self._engine.update_weights(transport, version)

    def sleep(self) -> None:
        """Sleep as `VllmEngine` does."""
        self._engine.sleep()

    def wake(self) -> None:
        """Wake as `VllmEngine` does."""
        self._engine.wake()

    def shutdown(self) -> None:
        """Nothing: the next run wants it."""


class EngineShelf:
    """Engines by model and number format, each started by the first run that needs it, on places of their own."""

    def __init__(self) -> None:
        self._engines: dict[tuple[str, str], tuple[VllmEngine, PresentPolicy]] = {}
        self._places: RayCluster | None = None

    def lend(self, setup: EngineSetup) -> LentEngine:
        """Return the engine of a run's model and number format.

        Raises:
            GenerationError: It does not start.
        """
        policy = setup.config.policy
        key = (policy.model_name, number_format(policy))
        if key not in self._engines:
            if self._places is None:  # those of a run end with it, and the actors in them
                self._places = RayCluster(setup.config.cluster)
            present = PresentPolicy(setup.policy)
            self._engines[key] = make_vllm_engine(replace(setup, cluster=self._places, policy=present)), present
        engine, present = self._engines[key]
        present.policy = setup.policy  # type: ignore[assignment]
        return LentEngine(engine)

    def close(self) -> None:
        """End all engines, and give their places back."""
        for engine, _ in self._engines.values():
            engine.shutdown()
        self._engines.clear()
        if self._places is not None:
            self._places.shutdown()
            self._places = None


SHELF = EngineShelf()
"""The engines of this process: a configuration names the function below, and cannot name an object."""


def lent_vllm_engine(setup: EngineSetup) -> LentEngine:
    """Return the engine that `policy.generation.backend` of `study.yaml` names."""
    return SHELF.lend(setup)
