# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules between the routers' settings. See `checks.py`."""

from collections import Counter
from collections.abc import Iterator

from nemo_rl_moe.config.schema import DPOMasterConfig, GRPOMasterConfig, MasterConfig

MEGATRON = "policy.megatron_cfg"


def routing_is_forced_in_one_way(config: MasterConfig) -> Iterator[str]:
    """Check that at most one kind of forced routing is on, and that the hot rank exists."""
    megatron = config.policy.megatron_cfg
    forced = {
        "moe_router_force_load_balancing": bool(megatron.moe_router_force_load_balancing),
        "moe_router_force_biased": megatron.moe_router_force_biased is not None,
        "moe_router_force_hot_rank": megatron.moe_router_force_hot_rank is not None,
    }
    used = [f"{MEGATRON}.{name}" for name, is_on in forced.items() if is_on]
    if len(used) > 1:
        yield f"{' and '.join(used)}: only one way of forced routing can be on"
    rank, size = megatron.moe_router_force_hot_rank, megatron.expert_model_parallel_size
    if rank is not None and megatron.moe_transformer_fields.get("moe_z_loss_coeff"):
        yield (
            f"{MEGATRON}.moe_z_loss_coeff: got {megatron.moe_transformer_fields['moe_z_loss_coeff']:g}, expected null"
            f" with {MEGATRON}.moe_router_force_hot_rank, whose logits it would pull down"
        )
    if rank is not None and rank >= size:
        yield (
            f"{MEGATRON}.moe_router_force_hot_rank: got {rank}, expected a rank below"
            f" {MEGATRON}.expert_model_parallel_size = {size}, or null"
        )


def routers_have_gradients_to_measure(config: MasterConfig) -> Iterator[str]:
    """Check that routers are tracked and trained, and not forced, if their gradients are measured."""
    megatron, chosen = config.policy.megatron_cfg, config.policy.megatron_cfg.router_gradients
    reasons = {
        f"{MEGATRON}.track_moe_metrics false": not megatron.track_moe_metrics,
        f"{MEGATRON}.freeze_moe_router true": megatron.freeze_moe_router,
        "policy.freeze.language_model true": config.policy.freeze.language_model,
        "forced routing": bool(megatron.moe_router_force_load_balancing)
        or megatron.moe_router_force_biased is not None
        or megatron.moe_router_force_hot_rank is not None,
    }
    for reason, is_so in reasons.items():
        if chosen.every_n_steps is not None and is_so:
            yield f"{MEGATRON}.router_gradients.every_n_steps: got {chosen.every_n_steps}, expected null with {reason}"


def balancing_types_match_coefficients(config: MasterConfig) -> Iterator[str]:
    """Check that the lists of balancing losses and of coefficients have the same length, and that each loss appears
    once."""
    fields = config.policy.megatron_cfg.moe_transformer_fields
    types, coefficients = fields.get("moe_router_load_balancing_type"), fields.get("moe_aux_loss_coeff")
    times = Counter(types if isinstance(types, list) else ())
    for kind in sorted(kind for kind, number in times.items() if number > 1):
        yield (
            f"{MEGATRON}.moe_router_load_balancing_type: got {kind} {times[kind]} times, expected it once, with the sum"
            " of its coefficients"
        )
    if types is None or coefficients is None:
        return
    lengths = [len(value) if isinstance(value, list) else None for value in (types, coefficients)]
    if lengths[0] != lengths[1]:
        words = [f"a list of {length}" if length is not None else "one value" for length in lengths]
        yield (
            f"{MEGATRON}.moe_aux_loss_coeff: got {words[1]}, but {MEGATRON}.moe_router_load_balancing_type is"
            f" {words[0]}; each type needs its own coefficient"
        )


def router_noise_is_for_fine_tuning(config: MasterConfig) -> Iterator[str]:
    """Refuse jitter, capacity and sinkhorn: with these, a token's probability depends on chance or on its batch.

    Reinforcement learning and preference training compare probabilities from several passes.
    """
    if not isinstance(config, GRPOMasterConfig | DPOMasterConfig):
        return
    fields = config.policy.megatron_cfg.moe_transformer_fields
    why = "the algorithm compares a token's probability in several passes, and"
    if jitter := fields.get("moe_input_jitter_eps"):
        yield (
            f"{MEGATRON}.moe_input_jitter_eps: got {jitter:g}, expected null: {why} noise at the router changes it"
            " from pass to pass; only SFT and reward models accept this setting"
        )
    capacity = fields.get("moe_expert_capacity_factor")
    if capacity is not None and capacity >= 0:
        yield (
            f"{MEGATRON}.moe_expert_capacity_factor: got {capacity:g}, expected null: {why} dropped assignments make"
            " it depend on the other sequences of its microbatch; only SFT and reward models accept this setting"
        )
    types = fields.get("moe_router_load_balancing_type")
    if types == "sinkhorn" or (isinstance(types, list) and "sinkhorn" in types):
        yield (
            f"{MEGATRON}.moe_router_load_balancing_type: got sinkhorn, expected aux_loss, seq_aux_loss, global_aux_loss"
            f" or none: {why} sinkhorn uses another routing rule in training than in other passes; only SFT and reward"
            " models accept this setting"
        )


def only_losses_are_listed(config: MasterConfig) -> Iterator[str]:
    """Check that a list of load balancing types only contains auxiliary losses, and no other type like `sinkhorn`."""
    types = config.policy.megatron_cfg.moe_transformer_fields.get("moe_router_load_balancing_type")
    if isinstance(types, list):
        for kind in ("sinkhorn", "quantile_balancing", "none"):
            if kind in types:
                yield (
                    f"{MEGATRON}.moe_router_load_balancing_type: got {kind} in a list, expected aux_loss, seq_aux_loss"
                    f" and global_aux_loss there; {kind} must be the only type"
                )


ROUTING_RULES = (
    routing_is_forced_in_one_way,
    routers_have_gradients_to_measure,
    balancing_types_match_coefficients,
    router_noise_is_for_fine_tuning,
    only_losses_are_listed,
)
