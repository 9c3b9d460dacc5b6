# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules between settings that only some algorithms have. See `checks.py`."""

from collections.abc import Iterator
from math import gcd

from nemo_rl_moe.config.checks_mixture import MIXTURE_RULES
from nemo_rl_moe.config.checks_reward_model import REWARD_MODEL_RULES
from nemo_rl_moe.config.checks_rollouts import ROLLOUT_RULES
from nemo_rl_moe.config.environments.rewards import ReasoningGymConfig
from nemo_rl_moe.config.environments.tools import ToolsConfig
from nemo_rl_moe.config.schema import DPOMasterConfig, GRPOMasterConfig
from nemo_rl_moe.config.schema_mixture import environment_key
from nemo_rl_moe.config.schema_run import GENERATION_ROLE
from nemo_rl_moe.rl.aggregation import AGGREGATION_RULES
from nemo_rl_moe.rl.corrections import CORRECTION_RULES
from nemo_rl_moe.rl.estimators.rules import ESTIMATOR_RULES
from nemo_rl_moe.rl.objectives.rules import objective_reads_its_settings


def step_is_whole_updates(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that the global batch size divides the number of responses of a step."""
    samples, size = config.responses_per_step, config.policy.train_global_batch_size
    if samples % size:
        yield (
            f"policy.train_global_batch_size: got {size}, expected a divisor of the {samples} responses of a step"
            f" (grpo.num_prompts_per_step {config.grpo.num_prompts_per_step} x grpo.num_generations_per_prompt"
            f" {config.grpo.num_generations_per_prompt}); nearest below: {_largest_divisor(samples, size)}"
        )
    elif config.updates_per_step > 1 and config.loss_fn.force_on_policy_ratio == "always":
        yield (
            f"loss_fn.force_on_policy_ratio: always needs one update a step, but {samples} responses are"
            f" {config.updates_per_step} global batches of policy.train_global_batch_size {size}; use auto"
        )


def response_fits_the_sequence(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that the response leaves room for a prompt."""
    longest, response = config.policy.max_total_sequence_length, config.policy.generation.max_new_tokens
    if response >= longest:
        yield (
            f"policy.generation.max_new_tokens: got {response}, expected less than policy.max_total_sequence_length"
            f" = {longest}, which holds the prompt too"
        )


def overlong_buffer_fits_the_response(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that the overlong buffer is not longer than the response."""
    shaping, longest = config.grpo.reward_shaping, config.policy.generation.max_new_tokens
    if shaping.enabled and shaping.overlong_buffer_length > longest:
        yield (
            f"grpo.reward_shaping.overlong_buffer_length: got {shaping.overlong_buffer_length}, expected at most"
            f" policy.generation.max_new_tokens = {longest}"
        )


def divergence_in_the_reward_has_a_meaning(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that a divergence in the reward has a weight above 0, the estimator k1, and the gradient `estimate`."""
    loss = config.loss_fn
    if not loss.use_kl_in_reward:
        return
    if loss.reference_policy_kl_penalty == 0:
        yield "loss_fn.use_kl_in_reward: got true, expected false with loss_fn.reference_policy_kl_penalty 0"
    if loss.reference_policy_kl_type != "k1":
        yield (
            f"loss_fn.reference_policy_kl_type: got {loss.reference_policy_kl_type}, expected k1 with"
            " loss_fn.use_kl_in_reward true: in a reward, the other estimators do not lead to a smaller divergence"
        )
    if loss.reference_policy_kl_gradient != "estimate":
        yield (
            f"loss_fn.reference_policy_kl_gradient: got {loss.reference_policy_kl_gradient}, expected estimate with"
            " loss_fn.use_kl_in_reward true: the divergence is then in the reward, and has no gradient in the loss"
        )


def environments_have_their_parts(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that each environment's driver fits its data, and that either driver or reward scores."""
    for name, env in config.env.environments.items():
        key = environment_key(name)
        data_key = f"data.environments.{name}" if name in config.data.environments else "data"
        yield from env.driver.problems(f"{key}.driver", data_key, config.data.of(name))
        kind = f"with {key}.driver.kind {env.driver.kind}"
        if env.reward is None and env.driver.scoring == "by_reward":
            yield f"{key}.reward: got null, expected a section, such as {{kind: math}}, {kind}, which scores nothing"
        if env.reward is not None and env.driver.scoring == "by_driver":
            yield f"{key}.reward: got kind {env.reward.kind}, expected null {kind}, which scores trajectories itself"
        if isinstance(env.driver, ToolsConfig) and env.driver.call_cost and env.reward_weights is not None:
            yield (
                f"{key}.driver.call_cost: got {env.driver.call_cost:g}, expected 0 with {key}.reward_weights: the"
                " reward is the weighted sum of the named rewards alone"
            )


def prompts_have_a_source(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that prompts come from a path, or from a task that samples them."""
    if config.env.mixture and not config.data.environments:
        return  # see `shared_prompts_are_read`
    for key, data in config.data.sources():
        name = key.removeprefix("data").removeprefix(".environments.")
        env = config.env.environments.get(name, config.env)
        for kind, source in (("train", data.train), ("validation", data.validation)):
            if source is None or source.path is not None or env.driver.has_own_prompts:
                continue
            if not isinstance(env.reward, ReasoningGymConfig):
                given = "null" if env.reward is None else f"of kind {env.reward.kind}"
                yield (
                    f"{key}.{kind}.path: null samples prompts from a reasoning_gym task, but"
                    f" {environment_key(name)}.reward is {given}; name a file or a dataset"
                )
            if source.num_items is None:
                yield (
                    f"{key}.{kind}.num_items: got null, expected a number of prompts to sample, as {key}.{kind}.path is"
                    " null"
                )


def sampled_prompts_are_held_out(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that sampled prompts of training and validation have different seeds."""
    for key, data in config.data.sources():
        train, validation = data.train, data.validation
        if validation is None or train.path is not None or validation.path is not None:
            continue
        name = key.removeprefix("data").removeprefix(".environments.")
        if config.env.environments.get(name, config.env).driver.has_own_prompts and train.split != validation.split:
            continue
        if train.seed == validation.seed:
            yield (
                f"{key}.validation.seed: got {validation.seed}, which is {key}.train.seed: validation would sample the"
                " training prompts; expected another seed"
            )


def greedy_validation_asks_once(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that greedy validation generates one response to each prompt, since further ones would be the same."""
    loop = config.grpo
    if loop.val_temperature == 0 and loop.val_num_generations > 1:
        yield (
            f"grpo.val_num_generations: got {loop.val_num_generations}, expected 1 with grpo.val_temperature 0, which"
            " gives the same response each time"
        )


def dynamic_sampling_may_replace_groups(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that dynamic sampling may generate more groups than a step has."""
    loop = config.grpo
    if loop.use_dynamic_sampling and loop.most_groups <= loop.num_prompts_per_step:
        yield (
            f"grpo.dynamic_sampling_max_groups: got {loop.most_groups}, which replaces no group; expected more than"
            f" grpo.num_prompts_per_step {loop.num_prompts_per_step} with grpo.use_dynamic_sampling true, or null"
        )


def named_rewards_come_from_somewhere(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that the scorer returns several rewards if named rewards have weights, and that at least one of these
    weights is not 0."""
    for name, env in config.env.environments.items():
        weights, section = env.reward_weights, environment_key(name)
        key = f"{section}.reward_weights"
        if weights is None:
            continue
        if not weights:
            example = "{accuracy: 1.0, format: 0.5}"
            yield f"{key}: got {{}}, expected the weight of each reward by name, such as {example}, or null"
        elif not any(weights.values()):
            yield f"{key}: all weights are 0, so that nothing would be trained"
        if env.driver.scoring == "by_driver" or not (env.driver.scoring == "by_either" or env.may_name_rewards):
            part = "driver" if env.reward is None else "reward"
            kind = env.driver.kind if env.reward is None else env.reward.kind
            yield (
                f"{key}: got {', '.join(weights)}, expected null with {section}.{part}.kind {kind}, which gives one"
                " reward; callable and custom give several"
            )


def advantage_bounds_leave_room(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that the bounds of advantages differ."""
    if config.grpo.advantage_clip_low == 0 and config.grpo.advantage_clip_high == 0:
        yield "grpo.advantage_clip_low and grpo.advantage_clip_high: both are 0, so that nothing would be trained"


def ranks_may_have_different_numbers_of_tokens(config: GRPOMasterConfig) -> Iterator[str]:
    """Refuse token dispatchers that need the same number of tokens on every rank, since generation does not ensure
    that."""
    megatron = config.policy.megatron_cfg
    if megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size == 1:
        return
    if megatron.moe_transformer_fields.get("moe_token_dispatcher_type") == "allgather":
        yield (
            "policy.megatron_cfg.moe_token_dispatcher_type: got allgather, expected alltoall with experts that are"
            " divided between ranks: allgather needs the same number of tokens on every rank, and generation does not"
            " ensure that"
        )


def template_has_a_place_for_the_prompt(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that the template contains the prompt. Otherwise all prompts would be the same."""
    template = config.data.prompt_template
    if template is not None and "{prompt}" not in template:
        yield f"data.prompt_template: got {template!r}, expected a text with {{prompt}} in it, or null"


def engine_has_what_it_needs(config: GRPOMasterConfig) -> Iterator[str]:
    """Check the rules of the chosen generation engine."""
    for rule in config.policy.generation.engine.rules:
        yield from rule(config)


def weights_can_travel(config: GRPOMasterConfig) -> Iterator[str]:
    """Check the transport of weights to engines: NCCL needs engines with separate GPUs, CUDA IPC needs engines on the
    trainer's GPUs."""
    generation, key = config.policy.generation, "policy.generation.weight_transport"
    chosen, has_own = generation.weight_transport, GENERATION_ROLE in config.cluster.roles
    engine = generation.engine
    if engine.shares_weights or chosen in ("files", "gloo"):
        return
    if config.cluster.gpus_per_node == 0:
        yield f"{key}: got {chosen}, expected files or gloo on CPUs (cluster.gpus_per_node 0)"
    elif chosen == "nccl" and not has_own:
        own = "cluster.roles.generation"
        yield f"{key}: got nccl, expected cuda_ipc or files: engines have no GPUs of their own ({own})"
    elif chosen == "cuda_ipc" and has_own:
        yield f"{key}: got cuda_ipc, expected nccl, gloo or files: the engines do not use the trainer's GPUs"


def _largest_divisor(number: int, limit: int) -> int:
    return max(divisor for divisor in range(1, min(number, limit) + 1) if gcd(number, divisor) == divisor)


def replay_has_routes(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that no other setting controls the routers if routes are replayed, and that a step has several updates if
    `old_policy` replays them."""
    megatron = config.policy.megatron_cfg
    key, replay = "policy.megatron_cfg.routing_replay", megatron.routing_replay
    if replay == "none":
        return
    reasons = {
        "moe_router_fusion": "a fused router ignores the replayed experts",
        "moe_enable_routing_replay": "both would replay routes",
    }
    for flag, reason in reasons.items():
        if getattr(megatron, flag, None) is True:
            yield f"policy.megatron_cfg.{flag}: got true, expected false with {key} {replay}: {reason}"
    if replay == "old_policy" and config.updates_per_step == 1:
        yield (
            f"{key}: got old_policy, expected none or rollout if a step is one update: only later updates could replay"
            " the routes of the first one (a smaller policy.train_global_batch_size gives several)"
        )


GRPO_RULES = (
    replay_has_routes,
    step_is_whole_updates,
    response_fits_the_sequence,
    overlong_buffer_fits_the_response,
    *CORRECTION_RULES,
    *AGGREGATION_RULES,
    objective_reads_its_settings,
    *ESTIMATOR_RULES,
    divergence_in_the_reward_has_a_meaning,
    *MIXTURE_RULES,
    environments_have_their_parts,
    prompts_have_a_source,
    ranks_may_have_different_numbers_of_tokens,
    template_has_a_place_for_the_prompt,
    sampled_prompts_are_held_out,
    greedy_validation_asks_once,
    dynamic_sampling_may_replace_groups,
    named_rewards_come_from_somewhere,
    *REWARD_MODEL_RULES,
    advantage_bounds_leave_room,
    engine_has_what_it_needs,
    weights_can_travel,
    *ROLLOUT_RULES,
)


def some_loss_has_weight(config: DPOMasterConfig) -> Iterator[str]:
    """Check that at least one of the two losses has a weight above 0."""
    if config.dpo.preference_loss_weight == 0 and config.dpo.sft_loss_weight == 0:
        yield "dpo.preference_loss_weight and dpo.sft_loss_weight: both are 0, so that nothing would be trained"


def smoothing_has_labels(config: DPOMasterConfig) -> Iterator[str]:
    """Check that label smoothing is 0 for losses that do not read it (all but `sigmoid` and `robust`), and above 0 for
    `robust`, which would otherwise be plain DPO."""
    kind, smoothing = config.dpo.preference_loss_type, config.dpo.label_smoothing
    if kind not in ("sigmoid", "robust") and smoothing > 0:
        yield (
            f"dpo.label_smoothing: got {smoothing}, expected 0 with dpo.preference_loss_type {kind}, which does not"
            " read it; sigmoid and robust do"
        )
    if kind == "robust" and smoothing == 0:
        yield (
            "dpo.label_smoothing: got 0, expected a number above 0 with dpo.preference_loss_type robust, which without"
            " it is sigmoid"
        )


DPO_RULES = (some_loss_has_weight, smoothing_has_labels)
