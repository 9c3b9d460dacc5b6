# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Start of a generation engine from its record (`config/engine.py`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from nemo_rl_moe.config.user_code import described
from nemo_rl_moe.distributed.shared_gpu import SharedGpu
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationBatch, GenerationEngine
from nemo_rl_moe.generation.refit import WeightSource
from nemo_rl_moe.models.hf_files import ModelSource

if TYPE_CHECKING:
    from nemo_rl_moe.config.schema import GRPOMasterConfig
    from nemo_rl_moe.distributed.cluster import RayCluster


class GeneratingPolicy(WeightSource, Protocol):
    """A policy that generates, or sends its weights to an engine.

    Attributes:
        model_files: Content of the files of the model's folder, without its weights.
        gpu: The GPUs that its ranks share with engines.
    """

    model_files: Mapping[str, bytes]
    gpu: SharedGpu

    def generate(self, batch: GenerationBatch) -> Sequence[GeneratedSequence]:
        """Return one continuation of each prompt, in the order of the prompts."""
        ...


@dataclass(frozen=True)
class EngineSetup:
    """Inputs of an engine's factory.

    Attributes:
        cluster: The trainer's workers. An engine starts its own actors.
        source: Source of the model. `source.folder()` contains its `config.json` on each machine.
        tokenizer: Decodes tokens, for stop strings.
        own_cluster: Workers of `cluster.roles.generation`, for the engine alone. If None, the engine shares the
            trainer's machines.
    """

    config: "GRPOMasterConfig"
    cluster: "RayCluster"
    source: ModelSource
    hf_config: Any
    tokenizer: Any
    policy: GeneratingPolicy
    warn: Callable[[str], None]
    own_cluster: "RayCluster | None" = None


def make_engine(setup: EngineSetup) -> GenerationEngine:
    """Start the engine that the configuration names, and return it."""
    engine = setup.config.policy.generation.engine.factory()(setup)
    if not isinstance(engine, GenerationEngine):
        raise ConfigurationError(
            f"policy.generation.backend: {setup.config.policy.generation.backend} gives {described(engine)}, expected a"
            " subclass of nemo_rl_moe.generation.interface.GenerationEngine"
        )
    return engine
