# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The record of the engine `megatron`: the training workers generate with their own weights. Imports no torch."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemo_rl_moe.config.engine import Engine

if TYPE_CHECKING:
    from nemo_rl_moe.config.schema import GRPOMasterConfig


def ranks_have_whole_sequences(config: "GRPOMasterConfig") -> Iterator[str]:
    """Yield a problem with context parallelism, for which the trainer's own engine has no key-value cache."""
    ranks = config.policy.megatron_cfg.context_parallel_size
    if ranks > 1:
        yield (
            "policy.generation.backend: got megatron, expected an engine with its own weights, as"
            f" policy.megatron_cfg.context_parallel_size is {ranks}: the trainer's ranks"
            " cannot generate parts of sequences"
        )


ENGINE = Engine(
    name="megatron",
    make="nemo_rl_moe.generation.lockstep:make_trainer_engine",
    rules=(ranks_have_whole_sequences,),
    shares_weights=True,
    number_format=lambda policy: policy.precision,
    captures_routes=lambda config: True,
    captures_indexers=True,
    returns_kept_tokens=True,
)
