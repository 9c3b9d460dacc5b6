# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The record of a generation engine: what configuration, memory plans and commands know of it. Imports no torch."""

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
    """Size of an engine's copies of the weights, for plans of memory and places.

    Attributes:
        num_copies: Copies of the weights, which share the requests.
        ranks: Processes that share the weights of a copy; on GPUs, one GPU each.
        gpu_memory_utilization: Share of a GPU's memory that a rank may take for weights and key-value cache; None: it
            takes as it needs.
        cpu_cache_bytes: Key-value cache of a copy on CPUs; None: as each batch needs.
        vocabulary_multiple: Embedding and output layer are padded to a multiple of so many tokens.
    """

    num_copies: int
    ranks: int
    dtype: str
    gpu_memory_utilization: float | None = None
    cpu_cache_bytes: int | None = None
    vocabulary_multiple: int = 1

    @property
    def largest_share(self) -> float:
        """Share of a GPU's memory that a rank may take at most."""
        return 1.0 if self.gpu_memory_utilization is None else self.gpu_memory_utilization


@dataclass(frozen=True)
class Engine:
    """Record of a generation engine: all that the package knows of it before it starts.

    The functions take a checked configuration.

    Attributes:
        name: Value of `policy.generation.backend`, and name of the engine's own section beside it.
        make: Starts the engine: a function of a `generation.registry.EngineSetup` that returns a `GenerationEngine`, or
            `package.module:function`, which is imported when a run starts.
        title: Name for people, in plans; empty: `name`.
        config_class: Schema of the section `policy.generation.NAME`; None: the engine has no section.
        rules: Checks between settings; each yields one line for each problem. Only the chosen engine's are checked.
        shares_weights: The engine runs the trainer's own weights on the trainer's workers. False: it keeps a copy,
            which may have machines of its own (`cluster.roles.generation`).
        size: Memory and places of an engine with a copy of the weights; None: plans do not count it.
        check_installation: Raises `ConfigurationError` where the engine cannot run here; before a model is read.
        check_model: Raises `ConfigurationError` where it cannot run a model, given by its Hugging Face configuration.
        number_format: Number format in which it computes, by the section `policy`; None: unknown.
        captures_routes: True where its sequences carry routed experts.
        returns_kept_tokens: It returns what top-k and top-p left to draw each token from (`loss_fn.sampling_mask`).
        takes_adapters: It puts the policy's adapters beside a base of its own (`policy.generation.lora_refit`).
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
    returns_kept_tokens: bool = False
    takes_adapters: bool = False

    def factory(self) -> Callable[[Any], Any]:
        """Return the function that starts the engine, imported where the record names it."""
        if not isinstance(self.make, str):
            return self.make
        function: Callable[[Any], Any] = import_attribute(f"{self.name}: make", self.make)
        return function
