# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The record of a generation engine. Configuration, memory plans and commands read it. This module imports no torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_rl_moe.config.schema_base import StrictModel
from nemo_rl_moe.config.user_code import import_attribute

if TYPE_CHECKING:
    from nemo_rl_moe.config.schema import GRPOMasterConfig
    from nemo_rl_moe.config.schema_grpo import GeneratingPolicyConfig


@dataclass(frozen=True)
class EngineSize:
    """Number and size of an engine's copies of the weights, for memory plans and the assignment of machines.

    Attributes:
        num_copies: Number of copies of the weights. Requests are divided between them.
        ranks: Number of processes that share the weights of a copy. On GPUs, each has a GPU.
        gpu_memory_utilization: Maximum share of a GPU's memory for a rank's weights and key-value cache. None: no
            limit.
        cpu_cache_bytes: Bytes of a copy's key-value cache on CPUs. None: the size that each batch needs.
        vocabulary_multiple: The vocabulary of embedding and output layer is padded to a multiple of this number.
    """

    num_copies: int
    ranks: int
    dtype: str
    gpu_memory_utilization: float | None = None
    cpu_cache_bytes: int | None = None
    vocabulary_multiple: int = 1

    @property
    def largest_share(self) -> float:
        """Maximum share of a GPU's memory that a rank uses."""
        return 1.0 if self.gpu_memory_utilization is None else self.gpu_memory_utilization


@dataclass(frozen=True)
class Engine:
    """Record of a generation engine: everything that the package needs to know before the engine starts.

    The functions take a checked configuration.

    Attributes:
        name: Value of `policy.generation.backend`, and name of the engine's section in `policy.generation`.
        make: Function that starts the engine. It takes a `generation.registry.EngineSetup` and returns a
            `GenerationEngine`. A text `package.module:function` is imported when a run starts.
        title: Name in plans. Empty: `name`.
        config_class: Schema of the section `policy.generation.NAME`. None: the engine has no section.
        rules: Checks between settings, run only for the chosen engine. Each yields one line for each problem.
        shares_weights: Whether the engine runs the trainer's weights on the trainer's workers. If not, it keeps a copy,
            and may have separate machines (`cluster.roles.generation`).
        size: Function that returns the size of an engine with a copy of the weights. None: plans do not count the
            engine.
        check_installation: Raises `ConfigurationError` if the engine cannot run here. Called before a model is read.
        check_model: Raises `ConfigurationError` if the engine cannot run a model, given its Hugging Face configuration.
        number_format: Function from the section `policy` to the number format of the engine's computation. It returns
            None if the format is unknown.
        captures_routes: Whether the engine's sequences contain routed experts.
        captures_indexers: Whether the engine's sequences can contain the positions that indexers choose.
        returns_kept_tokens: Whether the engine returns the tokens that top-k and top-p left to sample from
            (`loss_fn.sampling_mask`).
        takes_adapters: Whether the engine can apply the policy's adapters to a base that it keeps
            (`policy.generation.lora_refit`).
        lacks_base: Whether an engine that takes adapters starts without the policy's weights. Its first refit then
            includes the base.
    """

    name: str
    make: str | Callable[[Any], Any]
    title: str = ""
    config_class: type[StrictModel] | None = None
    rules: tuple[Callable[["GRPOMasterConfig"], Iterator[str]], ...] = ()
    shares_weights: bool = False
    size: Callable[["GRPOMasterConfig"], EngineSize] | None = None
    check_installation: Callable[["GRPOMasterConfig"], None] = lambda config: None
    check_model: Callable[["GRPOMasterConfig", Any], None] = lambda config, hf_config: None
    number_format: Callable[["GeneratingPolicyConfig"], str | None] = lambda policy: None
    captures_routes: Callable[["GRPOMasterConfig"], bool] = lambda config: False
    captures_indexers: bool = False
    returns_kept_tokens: bool = False
    takes_adapters: bool = False
    lacks_base: bool = False

    def factory(self) -> Callable[[Any], Any]:
        """Return the function that starts the engine. Import the function if `make` is its name."""
        if not isinstance(self.make, str):
            return self.make
        function: Callable[[Any], Any] = import_attribute(f"{self.name}: make", self.make)
        return function
