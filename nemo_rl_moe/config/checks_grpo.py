# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules between settings that only GRPO has; see `checks.py`."""

from collections.abc import Iterator
from math import gcd

from nemo_rl_moe.config.schema import GRPOMasterConfig


def step_is_whole_updates(config: GRPOMasterConfig) -> Iterator[str]:
    """The responses of a step are a whole number of global batches."""
    samples = config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt
    size = config.policy.train_global_batch_size
    if samples % size:
        yield (
            f"policy.train_global_batch_size: got {size}, expected a divisor of the {samples} responses of a step"
            f" (grpo.num_prompts_per_step {config.grpo.num_prompts_per_step} x grpo.num_generations_per_prompt"
            f" {config.grpo.num_generations_per_prompt}); nearest below: {_largest_divisor(samples, size)}"
        )
    elif samples > size and config.loss_fn.force_on_policy_ratio == "always":
        yield (
            f"loss_fn.force_on_policy_ratio: always needs one update a step, but {samples} responses are"
            f" {samples // size} global batches of policy.train_global_batch_size {size}; use auto"
        )


def response_fits_the_sequence(config: GRPOMasterConfig) -> Iterator[str]:
    """There is room for a prompt."""
    longest, response = config.policy.max_total_sequence_length, config.policy.generation.max_new_tokens
    if response >= longest:
        yield (
            f"policy.generation.max_new_tokens: got {response}, expected less than policy.max_total_sequence_length"
            f" = {longest}, which holds the prompt too"
        )


def overlong_buffer_fits_the_response(config: GRPOMasterConfig) -> Iterator[str]:
    """The punished part is a part of the response."""
    shaping, longest = config.grpo.reward_shaping, config.policy.generation.max_new_tokens
    if shaping.enabled and shaping.overlong_buffer_length > longest:
        yield (
            f"grpo.reward_shaping.overlong_buffer_length: got {shaping.overlong_buffer_length}, expected at most"
            f" policy.generation.max_new_tokens = {longest}"
        )


def importance_bounds_are_in_order(config: GRPOMasterConfig) -> Iterator[str]:
    """Something lies between the bounds of IcePop."""
    loss = config.loss_fn
    lower, upper = loss.importance_sampling_ratio_min, loss.importance_sampling_ratio_max
    if loss.importance_sampling_correction == "icepop" and lower >= upper:
        yield (
            f"loss_fn.importance_sampling_ratio_min: got {lower}, expected less than"
            f" loss_fn.importance_sampling_ratio_max = {upper}"
        )


def dual_clip_has_a_surrogate(config: GRPOMasterConfig) -> Iterator[str]:
    """CISPO's weight is a constant: there is no loss for dual clip to bound."""
    loss = config.loss_fn
    if loss.objective == "cispo" and loss.ratio_clip_c is not None:
        yield f"loss_fn.ratio_clip_c: got {loss.ratio_clip_c}, expected null with loss_fn.objective cispo"


def environment_has_its_section(config: GRPOMasterConfig) -> Iterator[str]:
    """The environment that is named is described."""
    if config.env.name != "math" and getattr(config.env, config.env.name) is None:
        yield f"env.{config.env.name}: null, but env.name is {config.env.name}, which reads that section"


def prompts_have_a_source(config: GRPOMasterConfig) -> Iterator[str]:
    """Prompts are read from a path, or drawn from a task."""
    for name, source in (("train", config.data.train), ("validation", config.data.validation)):
        if source is None or source.path is not None:
            continue
        if config.env.name != "reasoning_gym":
            yield (
                f"data.{name}.path: null draws prompts from a reasoning_gym task, but env.name is {config.env.name};"
                " name a file or a dataset"
            )
        if source.num_items is None:
            yield f"data.{name}.num_items: null, expected how many prompts to draw, as data.{name}.path is null"


def template_has_a_place_for_the_prompt(config: GRPOMasterConfig) -> Iterator[str]:
    """Otherwise every prompt would be the same."""
    template = config.data.prompt_template
    if template is not None and "{prompt}" not in template:
        yield f"data.prompt_template: got {template!r}, expected a text with {{prompt}} in it, or null"


def validation_has_prompts(config: GRPOMasterConfig) -> Iterator[str]:
    """Validation at any time needs held-out prompts."""
    if config.data.validation is not None:
        return
    for name, off in (("val_period", "0"), ("val_at_start", "false"), ("val_at_end", "false")):
        value = getattr(config.grpo, name)
        if value:
            yield f"grpo.{name}: {str(value).lower()} needs data.validation, which is null; set {off} or name the data"


def warmup_ends_within_the_run(config: GRPOMasterConfig) -> Iterator[str]:
    """Without a decay length of its own, the schedule ends with the run."""
    scheduler, steps = config.policy.megatron_cfg.scheduler, config.grpo.max_num_steps
    if scheduler.lr_decay_iters is not None or scheduler.lr_decay_style == "constant" or steps is None:
        return
    samples = config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt
    updates = steps * max(1, samples // config.policy.train_global_batch_size)
    if scheduler.lr_warmup_iters >= updates:
        yield (
            f"policy.megatron_cfg.scheduler.lr_warmup_iters: got {scheduler.lr_warmup_iters}, expected less than the"
            f" {updates} optimizer steps of grpo.max_num_steps = {steps} (lr_decay_iters is null)"
        )


def _largest_divisor(number: int, limit: int) -> int:
    return max(divisor for divisor in range(1, min(number, limit) + 1) if gcd(number, divisor) == divisor)


GRPO_RULES = (
    step_is_whole_updates,
    response_fits_the_sequence,
    overlong_buffer_fits_the_response,
    importance_bounds_are_in_order,
    dual_clip_has_a_surrogate,
    environment_has_its_section,
    prompts_have_a_source,
    template_has_a_place_for_the_prompt,
    validation_has_prompts,
    warmup_ends_within_the_run,
)
