# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules between settings of distillation: each is broken once and reported in one line; what works is let through."""

import pytest

from nemo_rl_moe.config.algorithm import ALGORITHMS
from nemo_rl_moe.config.checks_distillation import DISTILLATION_RULES
from nemo_rl_moe.config.loading import load_any_config, load_config_as
from nemo_rl_moe.config.schema_distillation import DistillationMasterConfig
from tests.unit.config.conftest import refused

KEY = "distillation"
SECOND = (f"+{KEY}.teachers.writer=${{{KEY}.teachers.teacher}}", "+cluster.roles.writer={cpu_workers_per_node: 1}")
MIXTURE = ("+env.mixture.sums={weight: 1.0}", "+env.mixture.words={weight: 1.0}")
BOTH = (*SECOND, *MIXTURE, f"{KEY}.teacher_by_environment={{sums: teacher, words: writer}}")
GIVEN = (
    f"{KEY}.responses=given",
    f"{KEY}.response_key=response",
    "grpo.num_prompts_per_step=128",
    "grpo.num_generations_per_prompt=1",
    "grpo.adv_estimator.name=reinforce",
    "grpo.adv_estimator.normalize_rewards=false",
    "policy.megatron_cfg.capture_routing=false",
)
NOBODY = f"with {KEY}.responses given: given responses are not sampled"

BROKEN: dict[str, dict[tuple[str, ...], str]] = {
    "estimates_from_old_tokens_are_bounded": {
        (
            f"{KEY}.topk_logits_k=null",
            "policy.generation.backend=vllm",
            "grpo.rollouts.mode=asynchronous",
            "grpo.rollouts.max_staleness=1",
        ): f"{KEY}.topk_logits_k: got null with grpo.rollouts.max_staleness 1 and"
        " loss_fn.importance_sampling_correction none: tokens that older weights sampled would have importance weights"
        " without a bound; set a correction such as truncated, which bounds the weights, or a number of candidates,"
        " which need no weights"
    },
    "responses_have_a_teacher": {
        (f"{KEY}.teachers={{}}", "cluster.roles={}"): f"{KEY}.teachers: got none, expected one or more, each with"
        " model_name, adapter, logprob_batch_size, megatron_cfg",
        SECOND: f"{KEY}.teacher_by_environment: got {{}}, expected a teacher for each environment, or"
        f" {KEY}.teacher_key: there are 2 teachers (teacher, writer)",
        (*BOTH, f"{KEY}.teacher_key=by"): f"{KEY}.teacher_by_environment: expected {{}} with {KEY}.teacher_key by,"
        " which names teachers",
        (
            *BOTH,
            f"{KEY}.teacher_by_environment={{sums: teacher, wards: writer}}",
        ): f"{KEY}.teacher_by_environment.wards: no such environment, expected one of sums, words; did you mean words?",
        (
            *BOTH,
            f"{KEY}.teacher_by_environment={{sums: teacher, words: write}}",
        ): f"{KEY}.teacher_by_environment.words: got write, expected one of teacher, writer; did you mean writer?",
        (*SECOND, *MIXTURE, f"{KEY}.teacher_by_environment={{sums: teacher}}"): f"{KEY}.teachers.writer: scores"
        f" nothing; name it in {KEY}.teacher_by_environment, or remove it",
        (f"{KEY}.teacher_by_environment={{sums: teacher}}",): f"{KEY}.teacher_by_environment.sums: no such environment,"
        " expected {} without env.mixture",
    },
    "divergence_has_candidates": {
        (f"{KEY}.topk_logits_k=null", f"{KEY}.kl_type=forward"): f"{KEY}.topk_logits_k: got null, expected a number of"
        f" candidates with {KEY}.kl_type forward: only reverse can be estimated from the sampled token"
    },
    "some_component_has_weight": {
        (f"{KEY}.kl_weight=0.0",): f"{KEY}.kl_weight: got 0, expected more: without the divergence, the run is GRPO"
        " (algorithm: grpo)"
    },
    "policy_is_sampled_as_it_is": {
        ("policy.generation.top_p=0.9",): "policy.generation.top_p: got 0.9, expected 1 with teachers: they score"
        " with unchanged logits, so the policy must sample from unchanged logits too"
    },
    "given_responses_are_not_sampled": {
        (f"{KEY}.cross_entropy_weight=0.5",): f"{KEY}.cross_entropy_weight: got 0.5, expected 0 with {KEY}.responses"
        " policy: the cross-entropy of the policy's own samples has an expected gradient of 0",
        (f"{KEY}.response_key=response",): f"{KEY}.response_key: got response, expected null with {KEY}.responses"
        " policy",
        (*GIVEN, f"{KEY}.response_key=null"): f"{KEY}.response_key: got null, expected the key of a record that holds"
        f" its response with {KEY}.responses given",
        (*GIVEN, f"{KEY}.policy_gradient_weight=1.0"): f"{KEY}.policy_gradient_weight: got 1.0, expected 0 {NOBODY}",
        (*GIVEN, "policy.megatron_cfg.capture_routing=true"): "policy.megatron_cfg.capture_routing: got true, expected"
        f" false {NOBODY}",
        (*GIVEN, f"{KEY}.topk_logits_k=null"): f"{KEY}.topk_logits_k: got null, expected a number of candidates"
        f" {NOBODY}",
    },
}


def load(*overrides: str) -> DistillationMasterConfig:
    return load_config_as(DistillationMasterConfig, "distillation_tiny_moe.yaml", overrides, check_paths=False)


@pytest.mark.parametrize(("overrides", "line"), [case for cases in BROKEN.values() for case in cases.items()])
def test_a_broken_rule_is_one_line(overrides: tuple[str, ...], line: str) -> None:
    assert refused(load, *overrides) == [line]


def test_every_rule_is_broken() -> None:
    assert {each.__name__ for each in DISTILLATION_RULES} == BROKEN.keys()


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        BOTH,
        GIVEN,
        (*GIVEN, f"{KEY}.cross_entropy_weight=0.5"),
        (*SECOND, f"{KEY}.teacher_key=by"),
        (f"{KEY}.topk_logits_k=null",),
    ],
)
def test_what_works_is_let_through(overrides: tuple[str, ...]) -> None:
    assert load(*overrides).distillation.teachers


def test_its_section_decides_between_it_and_grpo() -> None:
    config = load_any_config("distillation_tiny_moe.yaml", check_paths=False)
    assert isinstance(config, DistillationMasterConfig)
    assert list(ALGORITHMS["distillation"].roles(config)) == ["teacher"]


@pytest.mark.parametrize(("captures", "replay"), [(True, "none"), (False, "none"), (True, "rollout")])
def test_a_teacher_captures_its_routes_where_the_policy_does_and_replays_none(captures: bool, replay: str) -> None:
    megatron = "policy.megatron_cfg"
    config = load(f"{megatron}.capture_routing={str(captures).lower()}", f"{megatron}.routing_replay={replay}")
    teacher = config.distillation.teachers["teacher"].as_policy(config.policy)
    found = teacher.megatron_cfg
    assert (found.capture_routing, found.routing_replay) == (captures, "none")  # type: ignore[attr-defined]
    assert teacher.model_name == "results/grpo_tiny_moe/final"
    assert found.moe_transformer_fields == {}, "those of its own config.json hold"
