# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules between the adapters of a model and other settings. See `checks.py`.

The rules see a role's model as a `policy` section. `role_keys.py` puts the role's keys into their lines.
"""

from collections.abc import Iterator

from nemo_rl_moe.config.engines import BUILT_IN
from nemo_rl_moe.config.schema import GRPOMasterConfig, MasterConfig
from nemo_rl_moe.config.schema_lora import ALL_LINEAR, MLP_TARGETS, ROUTER

_KEY, _MEGATRON = "policy.lora", "policy.megatron_cfg"
_ADAPTER_TRANSPORTS = ("files", "gloo")
"""Transports in which every rank of the trainer sends its own tensors."""


def rollouts_know_the_adapters(config: MasterConfig) -> Iterator[str]:
    """Check that engine and transport support a refit that sends only adapters, and that adapter dropout is 0."""
    if not isinstance(config, GRPOMasterConfig):
        return
    lora, generation = config.policy.lora, config.policy.generation
    name, refit = "policy.generation.lora_refit", generation.lora_refit
    if refit == "adapter" and lora is None:
        yield f"{name}: got adapter, expected merged because {_KEY} is null"
    elif refit == "adapter" and not generation.engine.takes_adapters:
        takers = ", ".join(engine for engine, record in BUILT_IN.items() if record.takes_adapters)
        yield (
            f"{name}: got adapter, expected merged with policy.generation.backend {generation.backend}; engines that"
            f" take an adapter: {takers}"
        )
    if refit == "adapter" and generation.weight_transport not in _ADAPTER_TRANSPORTS:
        yield (
            f"policy.generation.weight_transport: got {generation.weight_transport}, expected"
            f" {' or '.join(_ADAPTER_TRANSPORTS)} with {name} adapter"
        )
    if lora is not None and lora.dropout > 0:
        yield (
            f"{_KEY}.dropout: got {lora.dropout}, expected 0.0: rollouts are sampled without dropout, so dropout in"
            " training would change the probability ratio"
        )


def experts_and_targets_agree(config: MasterConfig) -> Iterator[str]:
    """Check that the adapters' targets include layers of the MLP if routed experts have adapters."""
    lora = config.policy.lora
    if lora is None or lora.experts == "none" or {ALL_LINEAR, *MLP_TARGETS} & {*lora.targets}:
        return
    yield (
        f"{_KEY}.experts: got {lora.experts}, but {_KEY}.targets has no layer of the experts; expected {_KEY}.experts"
        f" none, or a target {', '.join(MLP_TARGETS)} or {ALL_LINEAR}"
    )


def the_base_is_frozen(config: MasterConfig) -> Iterator[str]:
    """Check that no setting trains the base weights of adapters, or freezes weights that adapters freeze already."""
    lora, megatron = config.policy.lora, config.policy.megatron_cfg
    if lora is None:
        return
    for name, is_frozen in config.policy.freeze:
        if is_frozen:
            yield f"policy.freeze.{name}: got true, expected false with {_KEY}, which freezes all weights"
    if megatron.freeze_moe_router and ROUTER in lora.targets:
        yield f"{_MEGATRON}.freeze_moe_router: got true, expected false with {ROUTER} among {_KEY}.targets"
    if rate := megatron.moe_transformer_fields.get("moe_router_bias_update_rate"):
        yield (
            f"{_MEGATRON}.moe_router_bias_update_rate: got {rate}, expected 0.0 or nothing with {_KEY}, which leaves"
            " the expert bias as it is"
        )


def shared_experts_run_alone(config: MasterConfig) -> Iterator[str]:
    """Refuse shared experts that overlap with communication. With overlap, Megatron-Core sums their outputs over the
    ranks later, and an adapter's term would count once for each rank."""
    if config.policy.lora is not None and config.policy.megatron_cfg.moe_transformer_fields.get(
        "moe_shared_expert_overlap"
    ):
        yield f"{_MEGATRON}.moe_shared_expert_overlap: got true, expected false with {_KEY}"


def factors_are_there_when_used(config: MasterConfig) -> Iterator[str]:
    """Refuse `overlap_param_gather`, which gathers weights during the next forward pass. Megatron-Core waits for a
    module's parameters when the module is called, but the modules that hold an adapter's factors `A` and `B` are never
    called."""
    parallel = config.policy.megatron_cfg.distributed_data_parallel_config
    if config.policy.lora is not None and parallel.overlap_param_gather:
        yield (
            f"{_MEGATRON}.distributed_data_parallel_config.overlap_param_gather: got true, expected false with {_KEY}"
        )


ADAPTER_RULES = (
    experts_and_targets_agree,
    the_base_is_frozen,
    shared_experts_run_alone,
    factors_are_there_when_used,
)
"""Rules for any trained model."""
LORA_RULES = (rollouts_know_the_adapters, *ADAPTER_RULES)
