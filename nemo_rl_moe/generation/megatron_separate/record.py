# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The record of the engine `megatron_separate`, and its section of the configuration. Imports no torch."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nemo_rl_moe.config.engine import Engine, EngineSize
from nemo_rl_moe.config.schema_base import Processes, StrictModel
from nemo_rl_moe.config.schema_run import GENERATION_ROLE
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.generation.places import other_kind_of_device

if TYPE_CHECKING:
    from nemo_rl_moe.config.schema import GRPOMasterConfig


class MegatronSeparateConfig(StrictModel):
    """Settings of `backend: megatron_separate`: a copy of the model on each worker of `cluster.roles.generation`."""

    cpu_threads: Processes
    """Number of threads of each copy on CPUs."""


def copies_have_places(config: "GRPOMasterConfig") -> Iterator[str]:
    """Yield a problem if `cluster.roles.generation` is missing or has other devices than the policy (GPUs or CPUs).

    The workers of this role hold the copies of the model.
    """
    if GENERATION_ROLE not in config.cluster.roles:
        yield (
            f"cluster.roles.{GENERATION_ROLE}: missing; expected the workers of policy.generation.backend"
            " megatron_separate, one for each copy of the weights, such as {cpu_workers_per_node: 1}"
        )
    elif (problem := other_kind_of_device(config)) is not None:
        yield problem


def size(config: "GRPOMasterConfig") -> EngineSize:
    """Return the engine's size: one copy of the weights on each worker of `cluster.roles.generation`."""
    cluster = config.cluster
    place = cluster.place_of(GENERATION_ROLE) if GENERATION_ROLE in cluster.roles else cluster
    return EngineSize(num_copies=place.world_size, ranks=1, dtype=config.policy.precision)


def check_model(config: "GRPOMasterConfig", hf_config: Any) -> None:
    """Check that a trained expert bias can be sent: it needs a Hugging Face name in the model's family."""
    from nemo_rl_moe.models.families import family_of

    bias = "decoder.layers.0.mlp.router.expert_bias"
    is_learnt = config.policy.megatron_cfg.moe_transformer_fields.get("moe_router_enable_expert_bias")
    if is_learnt and family_of(hf_config).rules.find(bias) is None:
        raise ConfigurationError(
            "policy.megatron_cfg.moe_router_enable_expert_bias: got true, expected false with policy.generation.backend"
            " megatron_separate: weights are sent under Hugging Face names, and"
            f" {hf_config.model_type} has none for the bias"
        )


ENGINE = Engine(
    name="megatron_separate",
    title="Megatron-Core beside the trainer",
    make="nemo_rl_moe.models.policy.separate_engine:make_separate_engine",
    config_class=MegatronSeparateConfig,
    rules=(copies_have_places,),
    size=size,
    check_model=check_model,
    number_format=lambda policy: policy.precision,
    captures_routes=lambda config: True,
    captures_indexers=True,
    returns_kept_tokens=True,
    takes_adapters=True,
)
