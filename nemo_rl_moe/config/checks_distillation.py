# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules between the settings of distillation. See `checks.py`."""

from collections.abc import Iterator

from nemo_rl_moe.config.checks_rollouts import LAG_KEY
from nemo_rl_moe.config.schema_distillation import DistillationMasterConfig
from nemo_rl_moe.config.schema_run import GENERATION_ROLE, POLICY_ROLE, REWARD_MODEL_ROLE
from nemo_rl_moe.config.suggestions import did_you_mean, nearest

_KEY = "distillation"


def responses_have_a_teacher(config: DistillationMasterConfig) -> Iterator[str]:
    """Check that there are teachers, and that each scores some responses."""
    teachers, by_environment = config.distillation.teachers, config.distillation.teacher_by_environment
    if not teachers:
        yield (
            f"{_KEY}.teachers: got none, expected one or more, each with model_name, adapter, logprob_batch_size,"
            " megatron_cfg"
        )
    for name in teachers:
        if name in (POLICY_ROLE, GENERATION_ROLE, REWARD_MODEL_ROLE):
            yield f"{_KEY}.teachers.{name}: expected another name: cluster.roles uses this one for another role"
    key = config.distillation.teacher_key
    if key is not None:
        if by_environment:
            yield f"{_KEY}.teacher_by_environment: expected {{}} with {_KEY}.teacher_key {key}, which names teachers"
        return
    if not by_environment:
        if len(teachers) > 1:
            yield (
                f"{_KEY}.teacher_by_environment: got {{}}, expected a teacher for each environment, or"
                f" {_KEY}.teacher_key: there are {len(teachers)} teachers ({', '.join(teachers)})"
            )
        return
    environments = [name for name in config.env.environments if name]
    for environment, teacher in by_environment.items():
        key = f"{_KEY}.teacher_by_environment.{environment}"
        if environment not in environments:
            known = f"expected one of {', '.join(environments)}" if environments else "expected {} without env.mixture"
            yield f"{key}: no such environment, {known}{did_you_mean(nearest(environment, environments))}"
        if teacher not in teachers:
            known = ", ".join(teachers)
            yield f"{key}: got {teacher}, expected one of {known}{did_you_mean(nearest(teacher, list(teachers)))}"
    named = set(by_environment.values())
    for name in teachers.keys() - named if named <= teachers.keys() else ():
        yield f"{_KEY}.teachers.{name}: scores nothing; name it in {_KEY}.teacher_by_environment, or remove it"


def divergence_has_candidates(config: DistillationMasterConfig) -> Iterator[str]:
    """Check that the divergence can be computed from the teacher's output."""
    settings = config.distillation
    if settings.topk_logits_k is None and settings.kl_type != "reverse":
        yield (
            f"{_KEY}.topk_logits_k: got null, expected a number of candidates with {_KEY}.kl_type {settings.kl_type}:"
            " only reverse can be estimated from the sampled token"
        )


def some_component_has_weight(config: DistillationMasterConfig) -> Iterator[str]:
    """Check that the teacher's component has a weight above 0."""
    if config.distillation.kl_weight == 0:
        yield f"{_KEY}.kl_weight: got 0, expected more: without the divergence, the run is GRPO (algorithm: grpo)"


def policy_is_sampled_as_it_is(config: DistillationMasterConfig) -> Iterator[str]:
    """Check that the policy samples from unchanged logits, since the teacher's distribution comes from such logits."""
    generation, key = config.policy.generation, "policy.generation"
    for name, found, expected in (
        ("temperature", generation.temperature, 1),
        ("top_p", generation.top_p, 1),
        ("top_k", generation.top_k, None),
    ):
        if found != expected:
            wanted = "null" if expected is None else expected
            yield (
                f"{key}.{name}: got {found}, expected {wanted} with teachers: they score with unchanged logits, so the"
                " policy must sample from unchanged logits too"
            )


def given_responses_are_not_sampled(config: DistillationMasterConfig) -> Iterator[str]:
    """Check that settings for sampled responses are off if responses are given, and that settings for given responses
    are off if the policy samples them."""
    settings, loop, megatron = config.distillation, config.grpo, config.policy.megatron_cfg
    if settings.responses == "policy":
        if settings.response_key is not None:
            yield f"{_KEY}.response_key: got {settings.response_key}, expected null with {_KEY}.responses policy"
        if settings.cross_entropy_weight > 0:
            yield (
                f"{_KEY}.cross_entropy_weight: got {settings.cross_entropy_weight}, expected 0 with {_KEY}.responses"
                " policy: the cross-entropy of the policy's own samples has an expected gradient of 0"
            )
        return
    given = f"with {_KEY}.responses given"
    if settings.response_key is None:
        yield f"{_KEY}.response_key: got null, expected the key of a record that holds its response {given}"
    for key, found, expected in (
        (f"{_KEY}.policy_gradient_weight", settings.policy_gradient_weight, 0),
        ("grpo.num_generations_per_prompt", loop.num_generations_per_prompt, 1),
        ("grpo.use_dynamic_sampling", loop.use_dynamic_sampling, False),
        ("grpo.rollouts.mode", loop.rollouts.mode, "synchronous"),
        ("policy.megatron_cfg.capture_routing", megatron.capture_routing, False),
        ("policy.megatron_cfg.routing_replay", megatron.routing_replay, "none"),
        ("policy.megatron_cfg.indexer_replay", megatron.indexer_replay, "none"),
    ):
        if found != expected:
            shown, wanted = (str(value).lower() if isinstance(value, bool) else value for value in (found, expected))
            yield f"{key}: got {shown}, expected {wanted} {given}: given responses are not sampled"
    if settings.topk_logits_k is None:
        yield (
            f"{_KEY}.topk_logits_k: got null, expected a number of candidates {given}: given responses are not sampled"
        )


def estimates_from_old_tokens_are_bounded(config: DistillationMasterConfig) -> Iterator[str]:
    """Check that importance weights are bounded if the divergence is estimated from tokens of older weights."""
    settings, lag = config.distillation, config.grpo.rollouts.most_lag
    if settings.topk_logits_k is None and lag > 0 and config.loss_fn.importance_sampling_correction == "none":
        yield (
            f"{_KEY}.topk_logits_k: got null with {LAG_KEY} {lag} and loss_fn.importance_sampling_correction none:"
            " tokens that older weights sampled would have importance weights without a bound; set a correction such"
            " as truncated, which bounds the weights, or a number of candidates, which need no weights"
        )


DISTILLATION_RULES = (
    estimates_from_old_tokens_are_bounded,
    given_responses_are_not_sampled,
    responses_have_a_teacher,
    divergence_has_candidates,
    some_component_has_weight,
    policy_is_sampled_as_it_is,
)
