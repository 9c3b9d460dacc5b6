# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""vLLM engines that outlive runs. A run borrows one, which gets the run's weights as at any start."""

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
    """Proxy of the policy of the present run, from which a restarted engine gets its weights."""

    def __init__(self, policy: Any):
        self.policy: MegatronPolicy = policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)


class LentEngine(GenerationEngine):
    """The engine of one run, which forwards to an engine that outlives the run."""

    can_score = True

    def __init__(self, engine: VllmEngine):
        self._engine = engine
        self.number_format = engine.number_format

    async def generate(self, request: GenerationRequest) -> GeneratedSequence:
        return await self._engine.generate(request)

    def score(
        self, sequences: Sequence[TokenSequence], temperature: float, *model_inputs: Mapping[str, ModelInput]
    ) -> Sequence[Scores]:
        return self._engine.score(sequences, temperature, *model_inputs)

    def update_weights(self, transport: WeightTransport, version: int) -> None:
        self._engine.update_weights(transport, version)

    def sleep(self) -> None:
        self._engine.sleep()

    def wake(self) -> None:
        self._engine.wake()

    def shutdown(self) -> None:
        """Do nothing, since the next run needs the engine."""


class EngineShelf:
    """Engines by model and number format. The first run that needs one starts it, in a separate placement group."""

    def __init__(self) -> None:
        self._engines: dict[tuple[str, str], tuple[VllmEngine, PresentPolicy]] = {}
        self._places: RayCluster | None = None

    def lend(self, setup: EngineSetup) -> LentEngine:
        """Return the engine of a run's model and number format.

        Raises:
            GenerationError: The engine does not start.
        """
        policy = setup.config.policy
        key = (policy.model_name, number_format(policy))
        if key not in self._engines:
            if self._places is None:  # a run's cluster ends with the run, together with its actors
                self._places = RayCluster(setup.config.cluster)
            present = PresentPolicy(setup.policy)
            self._engines[key] = make_vllm_engine(replace(setup, cluster=self._places, policy=present)), present
        engine, present = self._engines[key]
        present.policy = setup.policy  # type: ignore[assignment]
        return LentEngine(engine)

    def close(self) -> None:
        """End all engines, and release their CPUs."""
        for engine, _ in self._engines.values():
            engine.shutdown()
        self._engines.clear()
        if self._places is not None:
            self._places.shutdown()
            self._places = None


SHELF = EngineShelf()
"""The engines of this process. Global, since a configuration can only name the function below."""


def lent_vllm_engine(setup: EngineSetup) -> LentEngine:
    """Return the engine that `policy.generation.backend` of `study.yaml` names."""
    return SHELF.lend(setup)
