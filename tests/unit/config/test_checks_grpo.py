# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules between settings of GRPO: each is broken once and reported in exactly one line; what works is let through."""

import pytest

from nemo_rl_moe.config.checks_algorithms import GRPO_RULES
from nemo_rl_moe.config.checks_mixture import MIXTURE_RULES
from nemo_rl_moe.config.loading import load_any_config, load_grpo_config
from nemo_rl_moe.rl.estimators import ESTIMATORS
from nemo_rl_moe.rl.estimators.gdpo import rewards_are_shared
from nemo_rl_moe.rl.objectives import OBJECTIVES
from tests.unit.config.conftest import Problems, problems_with

NO_TASK = ("env.reward.kind=math",)
EXPERT_PARALLEL = "policy.megatron_cfg.expert_model_parallel_size"
SAMPLED = tuple(f"data.{name}.{value}" for name in ("train", "validation") for value in ("path=null", "num_items=9"))
WEIGHTS = "env.reward_weights"
CALLABLE = ("env.reward.kind=callable", "env.reward.function=package.module:function")
LEAVE_ONE_OUT = "grpo.adv_estimator.use_leave_one_out_baseline"

ESTIMATOR = "grpo.adv_estimator.name"
UNSCALED = ("grpo.adv_estimator.normalize_rewards=false",)
OBJECTIVE = "loss_fn.objective"
NAMED = (*CALLABLE, f"{WEIGHTS}={{accuracy: 1.0, format: 0.5}}", f"{ESTIMATOR}=gdpo")
REPLAY = "policy.megatron_cfg.routing_replay"
GSPO = "loss_fn.sequence_level_importance_ratios"
ONE_RESPONSE = ("grpo.num_prompts_per_step=128", "grpo.num_generations_per_prompt=1")
VLLM, WAY = "policy.generation.vllm", "policy.generation.weight_transport"
ROLLOUTS, LAG = "grpo.rollouts", "grpo.rollouts.max_staleness"
AHEAD = (f"{ROLLOUTS}.mode=asynchronous", "policy.generation.backend=vllm")
ON_GPUS = (
    *("policy.generation.backend=vllm", "cluster.num_nodes=2", "cluster.gpus_per_node=4"),
    "policy.train_micro_batch_size=16",
)
BY_MODEL = ("env.reward.kind=reward_model",)
REWARD_MODEL = (
    "reward_model={model_name: a, adapter: null, logprob_batch_size: 2, weight: 0.5,"
    " megatron_cfg: {tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1, expert_model_parallel_size: 1,"
    " expert_tensor_parallel_size: 1,"
    " sequence_parallel: false}}",
    "+cluster.roles.reward_model={cpu_workers_per_node: 1}",
)
VERIFIERS = (
    "env.driver={kind: verifiers, id: sums}",
    "env.reward=null",
    "data.train.path=null",
    "data.validation.path=null",
)
TASKSET = (
    "env.driver={kind: verifiers_v1, id: sums, validation: {split: test}}",
    "env.reward=null",
    "data.train.path=null",
    "data.validation.path=null",
)


OPENENV = ("env.driver={kind: openenv, server: 'a:app', action_key: a, observation_key: b}", "env.reward=null")
TOOLS = ("env.driver={kind: tools, tools: [calculator]}",)
DEFINITION = "data.tools=[{type: function, function: {name: add}}]"


INDEXERS = "policy.megatron_cfg.indexer_replay"

BROKEN: dict[str, dict[tuple[str, ...], str]] = {
    "replayed_positions_are_captured": {
        (
            f"{INDEXERS}=rollout",
            *ON_GPUS,
        ): f"{INDEXERS}: got rollout, expected none with policy.generation.backend vllm,"
        " which does not return the positions that indexers choose; backend megatron or megatron_separate does",
        (
            f"{INDEXERS}=rollout",
            "policy.megatron_cfg.capture_routing=false",
        ): f"{INDEXERS}: got rollout, expected none with policy.megatron_cfg.capture_routing false and routing_replay"
        " none: wrong positions are reported with wrong routes",
    },
    "replayed_mask_is_bounded_and_returned": {
        ("loss_fn.sampling_mask=replay", "policy.generation.top_p=0.9"): "loss_fn.sampling_mask: got replay, expected"
        " none with policy.generation.top_k null, or a maximum such as 128: top_p alone may keep the whole vocabulary,"
        " whose ids would be sent with each token",
        ("loss_fn.sampling_mask=replay", "policy.generation.top_k=20", *ON_GPUS): "loss_fn.sampling_mask: got replay,"
        " expected none with policy.generation.backend vllm, which does not return the tokens that top_p and top_k"
        " kept; backend megatron or megatron_separate does, and top_p 1 with top_k null needs no mask",
    },
    "engine_runs_beside_training": {
        (f"{ROLLOUTS}.mode=asynchronous",): f"{LAG}: got 1, expected 0 with policy.generation.backend megatron, which"
        " generates with the weights that are trained; megatron_separate and vllm have copies and can run ahead",
        (*ON_GPUS, f"{ROLLOUTS}.mode=asynchronous"): f"{ROLLOUTS}.mode: got asynchronous, expected synchronous without"
        " cluster.roles.generation: the engines sleep while the trainer uses their GPUs",
    },
    "lag_is_a_number_of_steps": {
        (*AHEAD, f"{ROLLOUTS}.target_lag=2"): f"{ROLLOUTS}.target_lag: got 2, expected at most {LAG} = 1, or null",
        (*AHEAD, "grpo.num_prompts_per_step=32"): f"{LAG}: got 1, expected 0 or at least 2: a step is 2 optimizer"
        " steps, and with a smaller lag no group could be generated ahead of its step",
    },
    "old_tokens_are_corrected": {
        (*AHEAD, f"{LAG}=2", "loss_fn.force_on_policy_ratio=always"): "loss_fn.force_on_policy_ratio: got always,"
        f" expected auto or never with loss_fn.importance_sampling_correction none and {LAG} 2: older weights sampled"
        " the tokens, and no importance weight would correct this; a correction, such as truncated, does",
        (
            *AHEAD,
            f"{LAG}=0",
            f"{ROLLOUTS}.replay_schedule=old.jsonl",
            "loss_fn.force_on_policy_ratio=always",
        ): "loss_fn.force_on_policy_ratio: got always, expected auto or never with"
        f" loss_fn.importance_sampling_correction none and {ROLLOUTS}.replay_schedule: older weights sampled the"
        " tokens, and no importance weight would correct this; a correction, such as truncated, does",
        (*AHEAD, "loss_fn.objective=reinforce"): "loss_fn.objective: got reinforce, expected clipped or cispo with"
        f" loss_fn.importance_sampling_correction none and {LAG} 1: older weights sampled the tokens, and no importance"
        " weight would correct this; a correction, such as truncated, does",
    },
    "replayed_routes_are_of_one_version": {
        (*AHEAD, f"{LAG}=2", "grpo.num_prompts_per_step=32", f"{REPLAY}=old_policy"): f"{REPLAY}: got old_policy,"
        f" expected none or rollout with {LAG} 2: old_policy replays routes of the weights before the update, but older"
        " weights sampled the tokens"
    },
    "schedule_is_read": {
        (f"{ROLLOUTS}.replay_schedule=schedule.jsonl",): f"{ROLLOUTS}.replay_schedule: got schedule.jsonl, expected"
        f" null with {ROLLOUTS}.mode synchronous"
    },
    "engine_has_what_it_needs": {
        ("policy.generation.backend=vllm", f"{VLLM}.tensor_parallel_size=2"): f"{VLLM}.tensor_parallel_size: got 2,"
        " expected 1 on CPUs (cluster.gpus_per_node 0)",
        (
            *ON_GPUS,
            "policy.generation.backend=megatron",
            "policy.megatron_cfg.context_parallel_size=2",
        ): "policy.generation.backend: got megatron, expected an engine with its own weights, as"
        " policy.megatron_cfg.context_parallel_size is 2: the trainer's ranks cannot generate parts of sequences",
        (*ON_GPUS, f"{VLLM}.tensor_parallel_size=3"): f"{VLLM}.tensor_parallel_size: got 3, expected a divisor of"
        " cluster.gpus_per_node 4; nearest below: 2",
        (*ON_GPUS, f"{VLLM}.tensor_parallel_size=2", f"{VLLM}.num_engines=5"): f"{VLLM}.num_engines: got 5, expected at"
        f" most 4: cluster.num_nodes 2 x cluster.gpus_per_node 4 / {VLLM}.tensor_parallel_size 2",
        ("policy.generation.backend=vllm", f"{VLLM}.expert_parallel=true"): f"{VLLM}.expert_parallel: got true,"
        f" expected false with {VLLM}.tensor_parallel_size 1: a single GPU has all experts",
        (*AHEAD, f"{VLLM}.prefix_caching=reset", "policy.megatron_cfg.capture_routing=true"): f"{VLLM}.prefix_caching:"
        " got 'reset', expected 'none' if policy.megatron_cfg.capture_routing is true or routing_replay is rollout:"
        " tokens from the cache are not computed again, and have no routed experts",
        (
            *("policy.generation.backend=vllm", f"{VLLM}.prefix_caching=keep"),
            *("policy.megatron_cfg.capture_routing=false", "loss_fn.importance_sampling_correction=truncated"),
        ): f"{VLLM}.prefix_caching: got 'keep', expected 'reset' with {ROLLOUTS}.mode synchronous: no response"
        " continues after an update",
        (*AHEAD, f"{VLLM}.prefix_caching=keep", "policy.megatron_cfg.capture_routing=false"): f"{VLLM}.prefix_caching:"
        " got 'keep', expected 'reset' with loss_fn.importance_sampling_correction none: without the correction,"
        " tokens sampled from keys and values of old weights would count in full",
        (
            *ON_GPUS,
            "+cluster.roles.generation={gpus_per_node: 2}",
            f"{VLLM}.tensor_parallel_size=4",
        ): f"{VLLM}.tensor_parallel_size: got 4, expected a divisor of cluster.roles.generation.gpus_per_node 2;"
        " nearest below: 2",
        (
            "policy.generation.backend=vllm",
            "+cluster.roles.generation={cpu_workers_per_node: 2}",
            f"{VLLM}.num_engines=3",
        ): f"{VLLM}.num_engines: got 3, expected at most 2: cluster.roles.generation.num_nodes 1 x"
        " cluster.roles.generation.cpu_workers_per_node 2",
        (*ON_GPUS, "+cluster.roles.generation={gpus_per_node: 0}"): "cluster.roles.generation.gpus_per_node: got 0,"
        " expected at least 1: the policy is on GPUs",
        ("policy.generation.backend=megatron_separate",): "cluster.roles.generation: missing; expected the workers of"
        " policy.generation.backend megatron_separate, one for each copy of the weights, such as {cpu_workers_per_node:"
        " 1}",
        (
            "policy.generation.backend=megatron_separate",
            "+cluster.roles.generation={gpus_per_node: 1}",
        ): "cluster.roles.generation.gpus_per_node: got 1, expected 0: the policy is on CPUs (cluster.gpus_per_node 0)",
        (
            "policy.generation.backend=vllm",
            "+cluster.roles.generation={gpus_per_node: 2}",
        ): "cluster.roles.generation.gpus_per_node: got 2, expected 0: the policy is on CPUs (cluster.gpus_per_node 0)",
    },
    "weights_can_travel": {
        ("policy.generation.backend=vllm", f"{WAY}=nccl"): f"{WAY}: got nccl, expected files or gloo on CPUs"
        " (cluster.gpus_per_node 0)",
        (*ON_GPUS, f"{WAY}=nccl"): f"{WAY}: got nccl, expected cuda_ipc or files: engines have no GPUs of their own"
        " (cluster.roles.generation)",
        (*ON_GPUS, f"{WAY}=cuda_ipc", "+cluster.roles.generation={gpus_per_node: 2}"): f"{WAY}: got cuda_ipc, expected"
        " nccl, gloo or files: the engines do not use the trainer's GPUs",
    },
    "step_is_whole_updates": {
        ("grpo.num_prompts_per_step=15",): "policy.train_global_batch_size: got 128, expected a divisor of the 120"
        " responses of a step (grpo.num_prompts_per_step 15 x grpo.num_generations_per_prompt 8); nearest below: 120",
        ("grpo.num_prompts_per_step=24",): "policy.train_global_batch_size: got 128, expected a divisor of the 192"
        " responses of a step (grpo.num_prompts_per_step 24 x grpo.num_generations_per_prompt 8); nearest below: 96",
        ("grpo.num_prompts_per_step=32", "loss_fn.force_on_policy_ratio=always"): "loss_fn.force_on_policy_ratio:"
        " always needs one update a step, but 256 responses are 2 global batches of policy.train_global_batch_size 128;"
        " use auto",
    },
    "response_fits_the_sequence": {
        ("policy.generation.max_new_tokens=64",): "policy.generation.max_new_tokens: got 64, expected less than"
        " policy.max_total_sequence_length = 64, which holds the prompt too"
    },
    "importance_of_sequences_is_read": {
        ("loss_fn.importance_sampling_level=sequence",): "loss_fn.importance_sampling_level: got sequence, expected"
        " token with loss_fn.importance_sampling_correction none, which does not read it; truncated and icepop do"
    },
    "importance_bounds_are_in_order": {
        ("loss_fn.importance_sampling_correction=sequence_mask",): "loss_fn.importance_sampling_ratio_min: got null,"
        " expected a number with loss_fn.importance_sampling_correction sequence_mask, such as 0.999 with a"
        " loss_fn.importance_sampling_ratio_max of 1.002",
        (
            "loss_fn.importance_sampling_correction=icepop",
            "loss_fn.importance_sampling_ratio_min=2.0",
        ): "loss_fn.importance_sampling_ratio_min: got 2.0, expected less than loss_fn.importance_sampling_ratio_max ="
        " 2.0",
    },
    "length_normalizer_has_a_sequence_loss": {
        ("loss_fn.length_normalizer=31",): "loss_fn.length_normalizer: got 31, expected null with"
        " loss_fn.token_level_loss true, which divides by the tokens of the global batch",
        (
            f"{GSPO}=true",
            "loss_fn.token_level_loss=false",
            "loss_fn.length_normalizer=31",
        ): f"loss_fn.length_normalizer: got 31, expected null with {GSPO} true: the one ratio of a sequence would count"
        " as often as it has tokens",
    },
    "objective_reads_its_settings": {
        ("loss_fn.objective=reinforce", "loss_fn.ratio_clip_c=3.0"): "loss_fn.ratio_clip_c: got 3.0, expected null with"
        " loss_fn.objective reinforce",
        ("loss_fn.objective=cispo", "loss_fn.ratio_clip_c=3.0"): "loss_fn.ratio_clip_c: got 3.0, expected null with"
        " loss_fn.objective cispo",
        (f"{GSPO}=true", "loss_fn.token_level_loss=false", "loss_fn.objective=cispo"): f"{GSPO}: got true, expected"
        " false with loss_fn.objective cispo, which weighs each token by its own ratio",
    },
    "sequence_ratios_have_a_sequence_loss": {
        (f"{GSPO}=true", "loss_fn.token_level_loss=false", "loss_fn.objective=reinforce"): f"{GSPO}: got true, expected"
        " false with loss_fn.objective reinforce, which has no ratio",
        (f"{GSPO}=true",): f"loss_fn.token_level_loss: got true, expected false with {GSPO} true: a mean over tokens"
        " would count the one ratio of a sequence as often as it has tokens",
    },
    "overlong_buffer_fits_the_response": {
        (
            "grpo.reward_shaping={enabled: true, overlong_buffer_length: 32, overlong_buffer_penalty: 1.0}",
        ): "grpo.reward_shaping.overlong_buffer_length: got 32, expected at most policy.generation.max_new_tokens = 31"
    },
    "divergence_in_the_reward_has_a_meaning": {
        ("loss_fn.use_kl_in_reward=true", "loss_fn.reference_policy_kl_type=k1"): "loss_fn.use_kl_in_reward: got true,"
        " expected false with loss_fn.reference_policy_kl_penalty 0",
        (
            "loss_fn.use_kl_in_reward=true",
            "loss_fn.reference_policy_kl_penalty=0.1",
        ): "loss_fn.reference_policy_kl_type: got k3, expected k1 with loss_fn.use_kl_in_reward true: in a reward, the"
        " other estimators do not lead to a smaller divergence",
        (
            "loss_fn.use_kl_in_reward=true",
            "loss_fn.reference_policy_kl_penalty=0.1",
            "loss_fn.reference_policy_kl_type=k1",
            "loss_fn.reference_policy_kl_gradient=divergence",
        ): "loss_fn.reference_policy_kl_gradient: got divergence, expected estimate with loss_fn.use_kl_in_reward true:"
        " the divergence is then in the reward, and has no gradient in the loss",
    },
    "replay_has_routes": {
        (f"{REPLAY}=rollout", "policy.megatron_cfg.moe_router_fusion=true"): "policy.megatron_cfg.moe_router_fusion:"
        f" got true, expected false with {REPLAY} rollout: a fused router ignores the replayed experts",
        (
            f"{REPLAY}=rollout",
            "policy.megatron_cfg.moe_enable_routing_replay=true",
        ): f"policy.megatron_cfg.moe_enable_routing_replay: got true, expected false with {REPLAY} rollout: both would"
        " replay routes",
        (f"{REPLAY}=old_policy",): f"{REPLAY}: got old_policy, expected none or rollout if a step is one update: only"
        " later updates could replay the routes of the first one (a smaller policy.train_global_batch_size gives"
        " several)",
    },
    "responses_have_others_to_be_compared_with": {
        ONE_RESPONSE: "grpo.num_generations_per_prompt: got 1, expected 2 or more with grpo.adv_estimator.name grpo,"
        " which compares the responses to one prompt; reinforce_plus_plus, reinforce and gae take 1",
        (*ONE_RESPONSE, f"{ESTIMATOR}=reinforce_plus_plus_baseline"): "grpo.num_generations_per_prompt: got 1, expected"
        " 2 or more with grpo.adv_estimator.name reinforce_plus_plus_baseline, which compares the responses to one"
        " prompt; reinforce_plus_plus, reinforce and gae take 1",
        (
            *ONE_RESPONSE,
            f"{ESTIMATOR}=reinforce_plus_plus",
            "grpo.use_dynamic_sampling=true",
        ): "grpo.use_dynamic_sampling: got true, expected false with grpo.num_generations_per_prompt 1: the rewards of"
        " a group of one are always all equal",
        (
            "grpo.num_prompts_per_step=1",
            "grpo.num_generations_per_prompt=1",
            "policy.train_global_batch_size=1",
            "policy.train_micro_batch_size=1",
            "cluster.cpu_workers_per_node=1",
            f"{ESTIMATOR}=reinforce_plus_plus",
        ): "grpo.num_prompts_per_step: got 1, expected 2 or more with grpo.num_generations_per_prompt 1: a response is"
        " compared with the other responses of its step",
    },
    "environments_have_their_parts": {
        ("env.reward=null",): "env.reward: got null, expected a section, such as {kind: math}, with env.driver.kind"
        " single_turn, which scores nothing",
        (VERIFIERS[0], *VERIFIERS[2:]): "env.reward: got kind reasoning_gym, expected null with env.driver.kind"
        " verifiers, which scores trajectories itself",
        (OPENENV[0],): "env.reward: got kind reasoning_gym, expected null with env.driver.kind openenv, which scores"
        " trajectories itself",
        ("env.driver.kind=tools",): "env.driver.tools: got [], expected a tool, or a server in env.driver.mcp_servers",
        (*TOOLS, DEFINITION): "data.tools: got 1, expected [] with env.driver.kind tools, which has tools of its own",
        ("env.driver={kind: agent, program: 'my_module:agent'}", DEFINITION): "data.tools: got 1, expected [] with"
        " env.driver.kind agent, which has tools of its own",
        (*VERIFIERS, DEFINITION): "data.tools: got 1, expected [] with env.driver.kind verifiers, which has tools of"
        " its own",
        (*VERIFIERS, "data.prompt_template='{prompt}'"): "data.prompt_template: got a text, expected null with"
        " env.driver.kind verifiers, whose environment makes prompts",
        (*VERIFIERS, "data.train.path=a.jsonl"): "data.train.path: got a.jsonl, expected null with env.driver.kind"
        " verifiers, whose environment has its own data",
        (*TASKSET, "data.train.path=a.jsonl"): "data.train.path: got a.jsonl, expected null with env.driver.kind"
        " verifiers_v1, whose environment has its own data",
        (*TASKSET, "env.driver.validation=null"): "env.driver.validation: got null, expected the settings of held-out"
        " tasks, such as {split: test}, or their number; or set data.validation: null",
        (*TASKSET, "+env.driver.agent.max_turns=3"): "env.driver.agent.max_turns: got 3, expected none:"
        " env.driver.max_turns sets it",
        (*TASKSET, "+env.driver.validation.id=other"): "env.driver.validation.id: got other, expected none:"
        " env.driver.id sets it",
        (*TOOLS, "env.driver.call_cost=0.5", "env.reward_weights={a: 1}", *CALLABLE): "env.driver.call_cost: got 0.5,"
        " expected 0 with env.reward_weights: the reward is the weighted sum of the named rewards alone",
    },
    "named_rewards_come_from_somewhere": {
        (*TASKSET, f"{WEIGHTS}={{a: 1.0}}"): "env.reward_weights: got a, expected null with env.driver.kind"
        " verifiers_v1, which gives one reward; callable and custom give several",
        (*VERIFIERS, f"{WEIGHTS}={{a: 1.0}}"): "env.reward_weights: got a, expected null with env.driver.kind"
        " verifiers, which gives one reward; callable and custom give several",
        (*OPENENV, f"{WEIGHTS}={{a: 1.0}}"): "env.reward_weights: got a, expected null with env.driver.kind openenv,"
        " which gives one reward; callable and custom give several",
        (*CALLABLE, f"{WEIGHTS}={{}}"): f"{WEIGHTS}: got {{}}, expected the weight of each reward by name, such as"
        " {accuracy: 1.0, format: 0.5}, or null",
        (*CALLABLE, f"{WEIGHTS}={{a: 0.0, b: 0}}"): f"{WEIGHTS}: all weights are 0, so that nothing would be trained",
        (f"{WEIGHTS}={{a: 1.0, b: 0.5}}",): f"{WEIGHTS}: got a, b, expected null with env.reward.kind reasoning_gym,"
        " which gives one reward; callable and custom give several",
    },
    "prompts_have_a_source": {
        (*NO_TASK, "data.train.path=null", "data.train.num_items=5"): "data.train.path: null samples prompts from a"
        " reasoning_gym task, but env.reward is of kind math; name a file or a dataset",
        ("data.validation.path=null",): "data.validation.num_items: got null, expected a number of prompts to sample,"
        " as data.validation.path is null",
    },
    "sampled_prompts_are_held_out": {
        (*SAMPLED, "data.train.seed=1"): "data.validation.seed: got 1, which is data.train.seed: validation would"
        " sample the training prompts; expected another seed"
    },
    "greedy_validation_asks_once": {
        ("grpo.val_temperature=0.0",): "grpo.val_num_generations: got 4, expected 1 with grpo.val_temperature 0, which"
        " gives the same response each time"
    },
    "dynamic_sampling_may_replace_groups": {
        (
            "grpo.use_dynamic_sampling=true",
            "grpo.num_prompts_per_step=32",
            "grpo.dynamic_sampling_max_groups=32",
        ): "grpo.dynamic_sampling_max_groups: got 32, which replaces no group; expected more than"
        " grpo.num_prompts_per_step 32 with grpo.use_dynamic_sampling true, or null"
    },
    "estimator_reads_its_settings": {
        (f"{LEAVE_ONE_OUT}=true", "grpo.adv_estimator.name=reinforce_plus_plus"): f"{LEAVE_ONE_OUT}: got true, expected"
        " false with grpo.adv_estimator.name reinforce_plus_plus, which does not read it; grpo, turn_grpo and gdpo do",
        (f"{LEAVE_ONE_OUT}=true", "grpo.adv_estimator.name=reinforce_plus_plus_baseline"): f"{LEAVE_ONE_OUT}: got true,"
        " expected false with grpo.adv_estimator.name reinforce_plus_plus_baseline, which does not read it; grpo,"
        " turn_grpo and gdpo do",
        (*NAMED, "grpo.adv_estimator.normalize_over=batch"): "grpo.adv_estimator.normalize_over: got batch, expected"
        " group with grpo.adv_estimator.name gdpo, which does not read it; grpo does",
        (
            f"{ESTIMATOR}=reinforce_plus_plus",
            "grpo.adv_estimator.normalize_over=batch",
        ): "grpo.adv_estimator.normalize_over: got batch, expected group with grpo.adv_estimator.name"
        " reinforce_plus_plus, which does not read it; grpo does",
    },
    "rewards_are_named": {
        (f"{ESTIMATOR}=gdpo",): f"{WEIGHTS}: got null, expected a weight for each reward with grpo.adv_estimator.name"
        " gdpo, which compares each named reward separately",
        (
            *NAMED,
            "grpo.reward_shaping={enabled: true, overlong_buffer_length: 31, overlong_buffer_penalty: 1.0}",
        ): "grpo.reward_shaping.enabled: got true, expected false with grpo.adv_estimator.name gdpo, which compares"
        " each named reward separately: there is no single reward to change",
    },
    "rewards_are_not_scaled": {
        (f"{ESTIMATOR}={name}",): "grpo.adv_estimator.normalize_rewards: got true, expected false with"
        f" grpo.adv_estimator.name {name}, which divides by no standard deviation"
        for name in ("reinforce", "maxrl", "optimal_token_baseline")
    },
    "rewards_are_not_lowered": {
        (
            *UNSCALED,
            f"{ESTIMATOR}=maxrl",
            "grpo.reward_shaping={enabled: true, overlong_buffer_length: 31, overlong_buffer_penalty: 1.0}",
        ): "grpo.reward_shaping.enabled: got true, expected false with grpo.adv_estimator.name maxrl, which divides by"
        " the mean reward: a penalty could make it negative",
        (
            *UNSCALED,
            f"{ESTIMATOR}=maxrl",
            "loss_fn.use_kl_in_reward=true",
            "loss_fn.reference_policy_kl_penalty=0.1",
            "loss_fn.reference_policy_kl_type=k1",
        ): "loss_fn.use_kl_in_reward: got true, expected false with grpo.adv_estimator.name maxrl, which divides by the"
        " mean reward: a penalty could make it negative",
        (
            *REWARD_MODEL,
            *UNSCALED,
            f"{ESTIMATOR}=maxrl",
        ): "reward_model: got weight 0.5, expected null, or weight 0, with grpo.adv_estimator.name maxrl, which divides"
        " by the mean reward: a score could make it negative",
        (
            *CALLABLE,
            *UNSCALED,
            f"{WEIGHTS}={{accuracy: 1.0, length: -0.5}}",
            f"{ESTIMATOR}=maxrl",
        ): f"{WEIGHTS}.length: got -0.5, expected 0 or more with grpo.adv_estimator.name maxrl, which divides by the"
        " mean reward: a penalty could make it negative",
        (
            "env.driver={kind: tools, tools: [calculator], call_cost: 0.25}",
            *UNSCALED,
            f"{ESTIMATOR}=maxrl",
        ): "env.driver.call_cost: got 0.25, expected 0 with grpo.adv_estimator.name maxrl, which divides by the mean"
        " reward: a penalty could make it negative",
    },
    "probabilities_are_of_all_tokens": {
        (
            *UNSCALED,
            f"{ESTIMATOR}=optimal_token_baseline",
            "policy.generation.top_k=64",
            "loss_fn.sampling_mask=replay",
        ): "loss_fn.sampling_mask: got replay, expected none with grpo.adv_estimator.name optimal_token_baseline, whose"
        " norms of gradients are over the full vocabulary",
    },
    "equal_rewards_teach_nothing": {
        (*UNSCALED, f"{ESTIMATOR}={name}", "grpo.zero_variance_filtering=true"): "grpo.zero_variance_filtering: got"
        f" true, expected false with grpo.adv_estimator.name {name}, which has advantages for a group of equal rewards"
        " too"
        for name in ("reinforce", "reinforce_plus_plus")
    },
    "advantages_reach_their_tokens": {
        (*changes, f"{ESTIMATOR}={name}", "loss_fn.token_level_loss=false", f"{key}={value}"): f"{key}: got {value},"
        f" expected {expected} with grpo.adv_estimator.name {name}, which gives an advantage to each token: one ratio"
        " for a sequence would train all its tokens on their mean advantage"
        for changes, name in (((), "turn_grpo"), (UNSCALED, "optimal_token_baseline"))
        for key, value, expected in (
            (GSPO, "true", "false"),
            (OBJECTIVE, "gmpo", "one with a ratio for each token, such as clipped,"),
        )
    },
    "has_a_sequence_loss": {
        (f"{OBJECTIVE}=gmpo",): "loss_fn.token_level_loss: got true, expected false with loss_fn.objective gmpo: the"
        " one value of a sequence would count as often as it has tokens",
        (
            f"{OBJECTIVE}=gmpo",
            "loss_fn.token_level_loss=false",
            "loss_fn.length_normalizer=31",
        ): "loss_fn.length_normalizer: got 31, expected null with loss_fn.objective gmpo: the one value of a sequence"
        " would count as often as it has tokens",
    },
    "needs_no_correction": {
        (
            f"{OBJECTIVE}={name}",
            "loss_fn.importance_sampling_correction=icepop",
        ): "loss_fn.importance_sampling_correction: got icepop, expected none with loss_fn.objective"
        f" {name}, whose ratio is already relative to the engine's probabilities"
        for name in ("dppo_tv", "dppo_kl")
    },
    "covariances_are_in_order": {
        (f"{OBJECTIVE}=clip_cov", "loss_fn.clip_cov_min=5.0"): "loss_fn.clip_cov_min: got 5.0, expected less than"
        " loss_fn.clip_cov_max = 5.0"
    },
    "ratio_moves": {
        (f"{OBJECTIVE}=kl_cov",): "policy.train_global_batch_size: got 128, expected less than the 128 responses of a"
        " step with loss_fn.objective kl_cov: with one update a step the ratio is 1, where its penalty has no gradient"
    },
    "advantage_bounds_leave_room": {
        ("grpo.advantage_clip_low=0.0", "grpo.advantage_clip_high=0.0"): "grpo.advantage_clip_low and"
        " grpo.advantage_clip_high: both are 0, so that nothing would be trained"
    },
    "ranks_may_have_different_numbers_of_tokens": {
        (
            f"{EXPERT_PARALLEL}=2",
            "+policy.megatron_cfg.moe_token_dispatcher_type=allgather",
        ): "policy.megatron_cfg.moe_token_dispatcher_type: got allgather, expected alltoall with experts that are"
        " divided between ranks: allgather needs the same number of tokens on every rank, and generation does not"
        " ensure that"
    },
    "environment_has_its_reward_model": {
        (*BY_MODEL,): "reward_model: got null, expected a section with model_name, adapter, logprob_batch_size,"
        " megatron_cfg and weight with env.reward.kind reward_model",
        (*BY_MODEL, *REWARD_MODEL, "reward_model.weight=0.0"): "reward_model.weight: got 0, expected another number"
        " with env.reward.kind reward_model, since nothing else gives a reward",
    },
    "reward_model_has_its_name": {
        (*REWARD_MODEL, *CALLABLE, f"{WEIGHTS}={{accuracy: 1.0, reward_model: 0.5}}"): f"{WEIGHTS}.reward_model:"
        " expected another name: this is the name of the reward model's score, whose weight is reward_model.weight"
    },
    "template_has_a_place_for_the_prompt": {
        ("data.prompt_template=Think.",): "data.prompt_template: got 'Think.', expected a text with {prompt} in it, or"
        " null"
    },
}


@pytest.mark.parametrize(("overrides", "line"), [case for cases in BROKEN.values() for case in cases.items()])
def test_broken_rule_gives_its_one_line(grpo_problems_of: Problems, overrides: tuple[str, ...], line: str) -> None:
    assert grpo_problems_of(*overrides) == [line]


@pytest.mark.parametrize("setting", [f"{GSPO}=true", f"{OBJECTIVE}=gmpo"])
def test_advantages_of_a_critic_need_a_ratio_of_each_token(setting: str) -> None:
    (line,) = problems_with(load_any_config, "ppo_tiny_moe.yaml")(setting, "loss_fn.token_level_loss=false")
    assert line.startswith(f"{setting.partition('=')[0]}: got ")
    assert f" with {ESTIMATOR} gae, which gives an advantage to each token: " in line


def test_every_rule_has_a_broken_example() -> None:
    records = (*ESTIMATORS.values(), *OBJECTIVES.values())
    rules = [*GRPO_RULES, *(rule for record in records for rule in record.rules)]
    elsewhere = {rule.__name__ for rule in (*MIXTURE_RULES, rewards_are_shared)}  # test_mixtures.py
    assert BROKEN.keys() | elsewhere == {rule.__name__ for rule in rules}


@pytest.mark.parametrize(
    "overrides",
    [
        ("grpo.num_prompts_per_step=32", "loss_fn.force_on_policy_ratio=never"),
        ("loss_fn.force_on_policy_ratio=always",),
        ("policy.generation.max_new_tokens=63",),
        ("grpo.reward_shaping={enabled: true, overlong_buffer_length: 31, overlong_buffer_penalty: 1.0}",),
        # What is off is not looked at.
        ("grpo.reward_shaping={enabled: false, overlong_buffer_length: 99, overlong_buffer_penalty: 1.0}",),
        ("loss_fn.importance_sampling_correction=none", "loss_fn.importance_sampling_ratio_min=9.0"),
        ("loss_fn.importance_sampling_correction=truncated", "loss_fn.importance_sampling_level=sequence"),
        ("loss_fn.importance_sampling_correction=sequence_mask", "loss_fn.importance_sampling_ratio_min=0.999"),
        ("loss_fn.token_level_loss=false", "loss_fn.length_normalizer=31"),
        ("loss_fn.objective=reinforce", "loss_fn.entropy_bonus=0.001"),
        (f"{OBJECTIVE}=gmpo", "loss_fn.token_level_loss=false"),
        (f"{OBJECTIVE}=dppo_tv", "loss_fn.ratio_clip_c=20.0"),
        (f"{OBJECTIVE}=kl_cov", "grpo.num_prompts_per_step=32"),
        (f"{OBJECTIVE}=kl_cov", *AHEAD),
        (f"{ESTIMATOR}=turn_grpo", f"{OBJECTIVE}=sapo", "loss_fn.token_level_loss=false"),
        (f"{ESTIMATOR}=turn_grpo", f"{OBJECTIVE}=a:b", f"{GSPO}=true", "loss_fn.token_level_loss=false"),
        ("loss_fn.clip_cov_min=9.0",),
        ("grpo.zero_variance_filtering=true",),
        NO_TASK,
        (*BY_MODEL, *REWARD_MODEL),
        (*REWARD_MODEL, "reward_model.weight=0.0"),
        VERIFIERS,
        TASKSET,
        (*TASKSET, "env.driver.validation=5"),
        (*TASKSET, "env.driver.validation=null", "data.validation=null", "grpo.val_period=0"),
        OPENENV,
        (*OPENENV, "env.driver.server=http://127.0.0.1:8000"),
        TOOLS,
        ("env.driver={kind: agent, program: [python, agent.py]}", "env.reward=null"),
        ("loss_fn.ratio_clip_min=1.0", "loss_fn.objective=cispo", "loss_fn.ratio_clip_max=4.0"),
        (f"{GSPO}=true", "loss_fn.token_level_loss=false"),
        (*ONE_RESPONSE, f"{ESTIMATOR}=reinforce_plus_plus"),
        ("loss_fn.kl_output_clamp_value=null",),
        CALLABLE,
        (*CALLABLE, f"{WEIGHTS}={{accuracy: 1, format: -0.5, length: 0}}"),
        (*NAMED, f"{LEAVE_ONE_OUT}=true", "grpo.use_dynamic_sampling=true"),
        # A rollout of one's own may score by itself.
        ("env.driver={kind: function, function: 'a:b'}", f"{WEIGHTS}={{a: 1.0}}"),
        ("data.train.path=null", "data.train.num_items=100"),
        ("data.validation=null",),
        SAMPLED,
        ("data.train.path=null", "data.train.num_items=9", "data.train.seed=1"),
        ("grpo.val_temperature=0.0", "grpo.val_num_generations=1"),
        ("grpo.adv_estimator.normalize_over=batch", "grpo.advantage_clip_high=3.0", "grpo.advantage_clip_low=0.0"),
        (*ONE_RESPONSE, f"{ESTIMATOR}=reinforce", "grpo.adv_estimator.normalize_rewards=false"),
        (*UNSCALED, f"{ESTIMATOR}=maxrl", *REWARD_MODEL, "reward_model.weight=0.0"),
        (*UNSCALED, f"{ESTIMATOR}=maxrl", *CALLABLE, f"{WEIGHTS}={{accuracy: 1.0, length: 0.0}}"),
        (*UNSCALED, f"{ESTIMATOR}=maxrl", *TOOLS),
        ("grpo.dynamic_sampling_max_groups=1",),
        ("grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_groups=1000"),
        (*AHEAD, "grpo.use_dynamic_sampling=true"),
        (f"{LEAVE_ONE_OUT}=true",),
        (f"{ROLLOUTS}.mode=asynchronous", f"{LAG}=0"),
        (f"{ROLLOUTS}.mode=asynchronous", f"{ROLLOUTS}.replay_schedule=schedule.jsonl"),
        AHEAD,
        (*AHEAD, "loss_fn.objective=reinforce", "loss_fn.importance_sampling_correction=truncated"),
        (*AHEAD, "loss_fn.force_on_policy_ratio=always", f"{LAG}=0"),
        (*AHEAD, f"{REPLAY}=rollout"),
        (f"{LAG}=9", "loss_fn.force_on_policy_ratio=always"),
        # Two updates a step: ten of them, of which five warm up.
        ("grpo.max_num_steps=3", "grpo.num_prompts_per_step=32"),
        ("grpo.max_num_steps=5", "policy.megatron_cfg.scheduler.lr_decay_iters=100"),
    ],
)
def test_what_works_is_let_through(overrides: tuple[str, ...]) -> None:
    load_grpo_config("grpo_tiny_moe.yaml", overrides, check_paths=False)


def test_rules_of_every_algorithm_hold_too(grpo_problems_of: Problems) -> None:
    assert grpo_problems_of("policy.train_micro_batch_size=48") == [
        "policy.train_global_batch_size: got 128, expected a multiple of 96 (2 data-parallel ranks x"
        " policy.train_micro_batch_size 48); nearest: 96 or 192"
    ]


def test_rules_run_on_the_valid_part(grpo_problems_of: Problems) -> None:
    problems = grpo_problems_of("grpo.seed=x", "loss_fn.ratio_clip_min=-1", "grpo.num_prompts_per_step=15")
    assert [problem.split(":")[0] for problem in problems] == [
        "grpo.seed",
        "loss_fn.ratio_clip_min",
        "policy.train_global_batch_size",
    ]


def test_responses_and_updates_of_a_step() -> None:
    config = load_grpo_config("grpo_tiny_moe.yaml", ["grpo.num_prompts_per_step=48"], check_paths=False)
    assert (config.responses_per_step, config.updates_per_step) == (384, 3)


def test_a_step_of_less_than_one_update_is_reported_once(grpo_problems_of: Problems) -> None:
    (problem,) = grpo_problems_of("grpo.num_prompts_per_step=8", "grpo.max_num_steps=9")
    assert problem.startswith("policy.train_global_batch_size: got 128, expected a divisor of the 64 responses")
