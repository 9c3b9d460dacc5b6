# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules between the settings of distillation; see `checks.py`."""

from collections.abc import Iterator

from nemo_rl_moe.config.schema_distillation import DistillationMasterConfig
from nemo_rl_moe.config.schema_run import GENERATION_ROLE, POLICY_ROLE
from nemo_rl_moe.config.suggestions import did_you_mean, nearest

_KEY = "distillation"


def responses_have_a_teacher(config: DistillationMasterConfig) -> Iterator[str]:
    """Check that there are teachers, each of which scores some responses."""
    teachers, by_environment = config.distillation.teachers, config.distillation.teacher_by_environment
    if not teachers:
        yield f"{_KEY}.teachers: got none, expected one or more, each with model_name, logprob_batch_size, megatron_cfg"
    for name in teachers:
        if name in (POLICY_ROLE, GENERATION_ROLE):
            yield f"{_KEY}.teachers.{name}: expected another name, which cluster.roles does not use for something else"
    if not by_environment:
        if len(teachers) > 1:
            yield (
                f"{_KEY}.teacher_by_environment: got {{}}, expected a teacher for each environment: there are"
                f" {len(teachers)} ({', '.join(teachers)})"
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
    for name in teachers.keys() - by_environment.values():
        yield f"{_KEY}.teachers.{name}: scores nothing; name it in {_KEY}.teacher_by_environment, or remove it"


def divergence_has_candidates(config: DistillationMasterConfig) -> Iterator[str]:
    """Check that the divergence can be had from what the teacher gives."""
    settings = config.distillation
    if settings.topk_logits_k is None and settings.kl_type != "reverse":
        yield (
            f"{_KEY}.topk_logits_k: got null, expected a number of candidates with {_KEY}.kl_type {settings.kl_type}:"
            " the sampled token alone gives reverse"
        )


def some_component_has_weight(config: DistillationMasterConfig) -> Iterator[str]:
    """Check that the teacher's component has a weight above 0."""
    if config.distillation.kl_weight == 0:
        yield f"{_KEY}.kl_weight: got 0, expected more: without the divergence it is GRPO (algorithm: grpo)"


def policy_is_sampled_as_it_is(config: DistillationMasterConfig) -> Iterator[str]:
    """Check that the policy's distribution is that of its logits, as the teacher's is."""
    generation, key = config.policy.generation, "policy.generation"
    for name, found, expected in (
        ("temperature", generation.temperature, 1),
        ("top_p", generation.top_p, 1),
        ("top_k", generation.top_k, None),
    ):
        if found != expected:
            wanted = "null" if expected is None else expected
            yield f"{key}.{name}: got {found}, expected {wanted} with a teacher, whose distribution is that of its logits"


DISTILLATION_RULES = (
    responses_have_a_teacher,
    divergence_has_candidates,
    some_component_has_weight,
    policy_is_sampled_as_it_is,
)
