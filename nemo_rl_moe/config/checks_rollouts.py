# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules for asynchronous rollouts. See `checks.py`."""

from collections.abc import Iterator

from nemo_rl_moe.config.engines import BUILT_IN
from nemo_rl_moe.config.schema import GRPOMasterConfig, engines_share_gpus
from nemo_rl_moe.config.schema_run import GENERATION_ROLE

KEY = "grpo.rollouts"
LAG_KEY = f"{KEY}.max_staleness"


def engine_runs_beside_training(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that the engine can generate during training."""
    rollouts, generation = config.grpo.rollouts, config.policy.generation
    if not rollouts.is_asynchronous:
        return
    if engines_share_gpus(config):
        yield (
            f"{KEY}.mode: got asynchronous, expected synchronous without cluster.roles.{GENERATION_ROLE}: the engines"
            " sleep while the trainer uses their GPUs"
        )
    elif rollouts.max_staleness > 0 and generation.engine.shares_weights and rollouts.replay_schedule is None:
        with_copies = " and ".join(name for name, engine in BUILT_IN.items() if not engine.shares_weights)
        yield (
            f"{LAG_KEY}: got {rollouts.max_staleness}, expected 0 with policy.generation.backend {generation.backend},"
            f" which generates with the weights that are trained; {with_copies} have copies and can run ahead"
        )


def lag_is_a_number_of_steps(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that the limits of staleness do not contradict each other."""
    rollouts, updates = config.grpo.rollouts, config.updates_per_step
    if not rollouts.is_asynchronous:
        return
    target, most = rollouts.target_lag, rollouts.max_staleness
    if target is not None and target > most:
        yield f"{KEY}.target_lag: got {target}, expected at most {LAG_KEY} = {most}, or null"
    lag = most if target is None else target
    if 0 < lag < updates:
        key = LAG_KEY if target is None else f"{KEY}.target_lag"
        yield (
            f"{key}: got {lag}, expected 0 or at least {updates}: a step is {updates} optimizer steps, and with a"
            " smaller lag no group could be generated ahead of its step"
        )


def old_tokens_are_corrected(config: GRPOMasterConfig) -> Iterator[str]:
    """Refuse losses that would treat tokens of old weights as if the policy had sampled them."""
    lag, loss = config.grpo.rollouts.most_lag, config.loss_fn
    if lag == 0 or loss.importance_sampling_correction != "none":
        return
    forced = {
        "loss_fn.force_on_policy_ratio: got always, expected auto or never": loss.force_on_policy_ratio == "always",
        "loss_fn.objective: got reinforce, expected clipped or cispo": loss.objective == "reinforce",
    }
    cause = f"{LAG_KEY} {lag}" if config.grpo.rollouts.replay_schedule is None else f"{KEY}.replay_schedule"
    for setting, is_chosen in forced.items():
        if is_chosen:
            yield (
                f"{setting} with loss_fn.importance_sampling_correction none and {cause}: older weights sampled"
                " the tokens, and no importance weight would correct this; a correction, such as truncated, does"
            )


def replayed_routes_are_of_one_version(config: GRPOMasterConfig) -> Iterator[str]:
    """Refuse the replay of routes that do not belong to the weights that sampled the tokens."""
    lag, replay = config.grpo.rollouts.most_lag, config.policy.megatron_cfg.routing_replay
    if lag > 0 and replay == "old_policy":
        yield (
            f"policy.megatron_cfg.routing_replay: got old_policy, expected none or rollout with {LAG_KEY} {lag}:"
            " old_policy replays routes of the weights before the update, but older weights sampled the tokens"
        )


def schedule_is_read(config: GRPOMasterConfig) -> Iterator[str]:
    """Refuse `replay_schedule` in a synchronous run, because only asynchronous rollouts read it."""
    rollouts = config.grpo.rollouts
    if rollouts.replay_schedule is not None and not rollouts.is_asynchronous:
        yield f"{KEY}.replay_schedule: got {rollouts.replay_schedule}, expected null with {KEY}.mode synchronous"


def replayed_mask_is_bounded_and_returned(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that, if the loss replays sampling masks, the engine returns them, and top-k bounds the size of a mask."""
    if config.loss_fn.sampling_mask == "none":
        return
    key, generation = "loss_fn.sampling_mask", config.policy.generation
    if not generation.engine.returns_kept_tokens:
        yield (
            f"{key}: got replay, expected none with policy.generation.backend {generation.backend}, which does not"
            " return the tokens that top_p and top_k kept; backend megatron or megatron_separate does, and top_p 1 with"
            " top_k null needs no mask"
        )
    elif generation.top_k is None:
        yield (
            f"{key}: got replay, expected none with policy.generation.top_k null, or a maximum such as 128: top_p alone"
            " may keep the whole vocabulary, whose ids would be sent with each token"
        )


def replayed_positions_are_captured(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that the engine returns the positions of indexers if training replays them, and that routes are captured,
    in whose report wrong positions are named."""
    key, megatron = "policy.megatron_cfg.indexer_replay", config.policy.megatron_cfg
    if megatron.indexer_replay == "none":
        return
    if not config.policy.generation.engine.captures_indexers:
        yield (
            f"{key}: got rollout, expected none with policy.generation.backend {config.policy.generation.backend},"
            " which does not return the positions that indexers choose; backend megatron or megatron_separate does"
        )
    if not megatron.capture_routing and megatron.routing_replay != "rollout":
        yield (
            f"{key}: got rollout, expected none with policy.megatron_cfg.capture_routing false and routing_replay"
            f" {megatron.routing_replay}: wrong positions are reported with wrong routes"
        )


ROLLOUT_RULES = (
    replayed_positions_are_captured,
    replayed_mask_is_bounded_and_returned,
    engine_runs_beside_training,
    lag_is_a_number_of_steps,
    old_tokens_are_corrected,
    replayed_routes_are_of_one_version,
    schedule_is_read,
)
