# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Generation engines by the value of `policy.generation.backend`: those of this package, and those of others."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_rl_moe.config.user_code import described, import_attribute
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.generation.interface import GenerationEngine
from nemo_rl_moe.generation.megatron import GeneratingPolicy, MegatronGeneration
from nemo_rl_moe.generation.vllm.releases import check_installation, check_model
from nemo_rl_moe.models.hf_files import ModelSource

if TYPE_CHECKING:
    from nemo_rl_moe.config.schema import GRPOMasterConfig
    from nemo_rl_moe.distributed.cluster import RayCluster

KEY = "policy.generation.backend"


@dataclass(frozen=True)
class EngineSetup:
    """Inputs of an engine's factory.

    Attributes:
        config: The whole configuration.
        cluster: Ray, started. An engine brings its own actors; the cluster's places are the trainer's.
        source: Where the model is read from; `source.folder()` has its `config.json` on each machine.
        hf_config: The model's Hugging Face configuration.
        tokenizer: Decodes tokens, for stop strings.
        policy: The trainer, for an engine that shares its weights.
        warn: Tells the user something.
        own_cluster: Places of `cluster.roles.generation`, which are the engine's alone; None: it has none.
    """

    config: "GRPOMasterConfig"
    cluster: "RayCluster"
    source: ModelSource
    hf_config: Any
    tokenizer: Any
    policy: GeneratingPolicy
    warn: Callable[[str], None]
    own_cluster: "RayCluster | None" = None


EngineFactory = Callable[[EngineSetup], GenerationEngine]


def _make_vllm_engine(setup: EngineSetup) -> GenerationEngine:
    from nemo_rl_moe.generation.vllm.engine import make_vllm_engine

    return make_vllm_engine(setup)


ENGINES: dict[str, EngineFactory] = {
    "megatron": lambda setup: MegatronGeneration(setup.policy),
    "vllm": _make_vllm_engine,
}


def find_engine(backend: str, *, on_gpus: bool) -> EngineFactory:
    """The factory of an engine; one of another package is imported.

    Args:
        backend: One of `ENGINES`, or `package.module:function`, a function of an `EngineSetup`. The working folder is
            searched too.
        on_gpus: False: on CPUs.

    Raises:
        ConfigurationError: There is no such function, or the engine's package is not installed.
    """
    if backend == "vllm":
        check_installation(on_gpus=on_gpus)
    if backend in ENGINES:
        return ENGINES[backend]
    found = import_attribute(KEY, backend)
    if not callable(found):
        raise ConfigurationError(f"{KEY}: {backend} is {described(found)}, expected a function of an EngineSetup")
    factory: EngineFactory = found
    return factory


def check_model_of_engine(
    backend: str, hf_config: Any, model_name: str, *, on_gpus: bool = True, tensor_parallel_size: int = 1
) -> None:
    """Checks that an engine of this package can build a model, before anything is started.

    Args:
        backend: As of `find_engine`.
        hf_config: The model's Hugging Face configuration.
        model_name: Its folder, or its name on the hub.
        on_gpus: False: on CPUs.
        tensor_parallel_size: Ranks of an engine.

    Raises:
        ConfigurationError: It cannot.
    """
    if backend == "vllm":
        check_model(hf_config, model_name, on_gpus=on_gpus, tensor_parallel_size=tensor_parallel_size)
