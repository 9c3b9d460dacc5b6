# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's keys of the loops, the loss of GRPO and checkpoints, each with its counterpart here."""

from typing import Any

from nemo_rl_moe.config.nemo_rl_row import Row, no_counterpart, same_names
from nemo_rl_moe.rl.estimators import ESTIMATORS


def _or_never(period: Any) -> Any:
    """Return a period of validation; below 0 there, 0 here is never."""
    return max(period or 0, 0)


def metric_name(name: Any) -> Any:
    """Return the name of the metric that chooses checkpoints: every loss of validation is `val:loss` here."""
    is_loss = isinstance(name, str) and name.startswith("val:") and name.endswith("_loss")
    return "val:loss" if is_loss else name


_NAMED = " and ".join(f"`{estimator.name}`" for estimator in ESTIMATORS.values() if estimator.reads_named_rewards)
"""Estimators of rewards that have names."""
_LOOP = ("max_num_epochs", "max_num_steps", "val_at_start", "val_at_end", "seed")
_BATCHES = "validation takes batches of `policy.train_global_batch_size`: `val_batches` counts as many samples"

ALGORITHM_ROWS: tuple[Row, ...] = (
    # The loops.
    *(row for section in ("sft", "dpo", "grpo") for row in same_names(section, *_LOOP)),
    *(
        Row(f"{section}.val_period", f"{section}.val_period", "below 0 is 0: never", _or_never)
        for section in ("sft", "dpo", "grpo")
    ),
    *(
        row
        for section in ("sft", "dpo")
        for row in (
            Row(f"{section}.val_batches", f"{section}.val_batches", _BATCHES, None),
            Row(f"{section}.val_global_batch_size", f"{section}.val_batches", _BATCHES, None),
            Row(f"{section}.val_micro_batch_size", None, "validation takes `policy.train_micro_batch_size`", off=1),
        )
    ),
    *no_counterpart("sft", "every assistant turn is trained on", "only_unmask_final"),
    *same_names(
        "dpo",
        "reference_policy_kl_penalty",
        "preference_average_log_probs",
        "sft_average_log_probs",
        "preference_loss_weight",
        "sft_loss_weight",
    ),
    *same_names(
        "grpo",
        "num_prompts_per_step",
        "num_generations_per_prompt",
        "use_dynamic_sampling",
        "dynamic_sampling_max_gen_batches",
        "overlong_filtering",
        "advantage_clip_low",
        "advantage_clip_high",
        "max_val_samples",
    ),
    Row("grpo.val_num_generations_per_prompt", "grpo.val_num_generations"),
    Row("grpo.normalize_rewards", "grpo.adv_estimator.normalize_rewards", "`grpo.adv_estimator`'s wins", None),
    Row("grpo.use_leave_one_out_baseline", "grpo.adv_estimator.use_leave_one_out_baseline", "as above", None),
    Row(
        "grpo.adv_estimator.name",
        "grpo.adv_estimator.name",
        "`reinforce_plus_plus` with `minus_baseline` is `reinforce_plus_plus_baseline`; `raw_reward` is `reinforce`, or"
        f" normalised `reinforce_plus_plus`. REINFORCE++ counts each response once, theirs each token; {_NAMED} is"
        " here too, for rewards with names: the translation says what to write; `gae` and `opd` have no counterpart",
        None,
    ),
    Row(
        "grpo.adv_estimator.normalize_rewards",
        "grpo.adv_estimator.normalize_rewards",
        "with a leave-one-out baseline their standard deviation leaves the response out too, ours is the whole group's",
        None,
    ),
    Row("grpo.adv_estimator.use_leave_one_out_baseline", "grpo.adv_estimator.use_leave_one_out_baseline", "", None),
    Row("grpo.adv_estimator.minus_baseline", "grpo.adv_estimator.name", "see there", None),
    Row("grpo.adv_estimator.normalize_advantages", "grpo.adv_estimator.name", "of `raw_reward`: see there", None),
    Row(
        "grpo.adv_estimator.reward_weights",
        "env.reward_weights",
        f"by place there, by name here; the translation of {_NAMED} says what to write",
        None,
    ),
    *no_counterpart("grpo.adv_estimator", "of estimators without a counterpart", "*"),
    Row("grpo.reward_shaping.enabled", "grpo.reward_shaping.enabled"),
    Row("grpo.reward_shaping.overlong_buffer_length", "grpo.reward_shaping.overlong_buffer_length", "", None),
    Row(
        "grpo.reward_shaping.overlong_buffer_penalty",
        "grpo.reward_shaping.overlong_buffer_penalty",
        "ours ends at the whole penalty; theirs goes on beyond `max_response_length`",
        None,
    ),
    Row(
        "grpo.reward_shaping.max_response_length",
        "policy.generation.max_new_tokens",
        "the buffer ends where a response has to",
        None,
    ),
    *no_counterpart("grpo.reward_shaping", "no such punishment", "stop_properly_penalty_coef"),
    *no_counterpart(
        "grpo.reward_scaling",
        "rewards are taken as the environment gives them: a linear map changes nothing where advantages are normalised,"
        " but for the size of the overlong penalty beside it",
        "*",
    ),
    *no_counterpart(
        "grpo", "a round of dynamic sampling generates `num_prompts_per_step` prompts", "batch_multiplier", off=1
    ),
    *no_counterpart("grpo", "several turns are a coroutine of yours: `env.rollout`", "max_rollout_turns", off=1),
    *no_counterpart(
        "grpo", "validation is one round of `policy.generation.max_batch_size` sequences a rank", "val_batch_size"
    ),
    *no_counterpart("grpo", "validation is periodic from the start", "val_start_at", off=-1),
    *no_counterpart(
        "grpo", "a run ends by steps or epochs", "stop_at_validation_metric", "stop_at_validation_threshold"
    ),
    *no_counterpart(
        "grpo",
        "`loss_fn.importance_sampling_correction: sequence_mask` leaves out responses that training disagrees with",
        "seq_logprob_error_threshold",
    ),
    *no_counterpart(
        "grpo", "without a divergence no reference model is run", "skip_reference_policy_logprobs_calculation"
    ),
    *no_counterpart(
        "grpo", "`grpo.use_dynamic_sampling` draws other prompts instead", "zero_variance_prompt_filtering"
    ),
    *no_counterpart("grpo", "the trainer stores images once, always", "deduplicate_multimodal_data", off=True),
    *no_counterpart("grpo", "no such metrics", "debug_payload_metrics"),
    *no_counterpart("grpo", "no tools", "invalid_tool_call_advantage", "malformed_thinking_advantage"),
    Row(
        "grpo.async_grpo.enabled",
        "grpo.rollouts.mode",
        "`synchronous` or `asynchronous`",
        lambda value: "asynchronous" if value else "synchronous",
    ),
    Row(
        "grpo.async_grpo.max_trajectory_age_steps",
        "grpo.rollouts.max_staleness",
        "in optimizer steps: with several updates a step, times their number",
    ),
    *no_counterpart(
        "grpo.async_grpo",
        "`grpo.rollouts.partial`: responses go on under new weights, with keys and values computed anew",
        "in_flight_weight_updates",
        "recompute_kv_cache_after_weight_updates",
    ),
    *no_counterpart(
        "grpo.async_grpo", "lost engines are replaced, and their requests asked again", "max_generation_failures"
    ),
    *no_counterpart("async_rl", "`grpo.rollouts` has what runs ahead of training", "*"),
    *no_counterpart("reward_penalties", "write them into the reward: `env.name: callable`", "*"),
    # The loss of GRPO.
    *same_names(
        "loss_fn",
        "reference_policy_kl_penalty",
        "kl_output_clamp_value",
        "ratio_clip_min",
        "ratio_clip_max",
        "ratio_clip_c",
        "sequence_level_importance_ratios",
        "token_level_loss",
    ),
    Row(
        "loss_fn.reference_policy_kl_type",
        "loss_fn.reference_policy_kl_type",
        "in the reward only k1, as the others do not lead to a smaller divergence there",
        None,
    ),
    *no_counterpart(
        "loss_fn", "the logarithm of a ratio is bounded by 20 in every estimate", "kl_input_clamp_value", off=20.0
    ),
    Row(
        "loss_fn.use_on_policy_kl_approximation",
        "loss_fn.reference_policy_kl_gradient",
        "always `divergence`: theirs has the score function's part of the gradient too. Ours weighs a token by the"
        " policy over that before the step, theirs by 1 or, with this key, by the policy over the engine's; and the"
        " divergence gets the importance-sampling weight of its token here",
        None,
    ),
    Row(
        "loss_fn.use_kl_in_reward",
        "loss_fn.use_kl_in_reward",
        "of the whole response, before advantages, with every estimator; theirs of each token, with REINFORCE++ alone",
        None,
    ),
    Row(
        "loss_fn.use_importance_sampling_correction",
        "loss_fn.importance_sampling_correction",
        "without a type: `truncated` at a bound that nothing reaches",
        None,
    ),
    Row(
        "loss_fn.truncated_importance_sampling_type",
        "loss_fn.importance_sampling_correction",
        "`tis` is `truncated`, `icepop` the same, `seq-mask-tis` is `sequence_mask`; with"
        " `sequence_level_importance_ratios` the weights are of whole responses too: `importance_sampling_level`",
        None,
    ),
    Row(
        "loss_fn.truncated_importance_sampling_ratio", "loss_fn.importance_sampling_ratio_max", "where it is read", None
    ),
    Row(
        "loss_fn.truncated_importance_sampling_ratio_min",
        "loss_fn.importance_sampling_ratio_min",
        "where it is read",
        None,
    ),
    Row(
        "loss_fn.force_on_policy_ratio",
        "loss_fn.force_on_policy_ratio",
        "true is `always`; false is `auto`, which saves a pass where a step is one update: the ratio is 1 anyway",
        lambda value: "always" if value else "auto",
    ),
    Row("loss_fn.use_cispo", "loss_fn.objective", "`cispo`", None),
    Row("loss_fn.disable_ppo_ratio", "loss_fn.objective", "`reinforce`", None),
    *no_counterpart("loss_fn", "no such term", "positive_example_nll_weight"),
    # Checkpoints.
    *same_names(
        "checkpointing",
        "enabled",
        "checkpoint_dir",
        "higher_is_better",
        "keep_top_k",
        "save_period",
        "checkpoint_must_save_by",
        "save_optimizer",
    ),
    Row("checkpointing.metric_name", "checkpointing.metric_name", "losses of validation are `val:loss`", metric_name),
    *no_counterpart(
        "checkpointing",
        "checkpoints are Megatron-Core's, the final weights a Hugging Face folder; `convert` makes the others",
        "model_save_format",
        "save_consolidated",
        "pretrained_checkpoint.*",
    ),
)
