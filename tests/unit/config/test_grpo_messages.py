# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What a user of GRPO reads after a wrong key, type, value or command, and the keys that are theirs to choose."""

from pathlib import Path

import pytest

from nemo_rl_moe.config.environments.rewards import CallableConfig, ReasoningGymConfig
from nemo_rl_moe.config.loading import dump_resolved, load_any_config, load_config, load_grpo_config
from nemo_rl_moe.errors import ConfigurationError
from tests.unit.config.conftest import Problems, about_keys

REFUSED = {
    "grpo.num_prompt_per_step=4": "unknown key; did you mean grpo.num_prompts_per_step?",
    "+grpo.adv_estimator.leave_one_out_baseline=true": "unknown key; did you mean"
    " grpo.adv_estimator.use_leave_one_out_baseline?",
    "loss_fn.ratio_clip=0.1": "unknown key; did you mean loss_fn.ratio_clip_c?",
    "policy.generation.max_tokens=9": "unknown key; did you mean policy.generation.max_new_tokens?",
    "env.timeout=3": "unknown key; did you mean env.reward.timeout_s?",
    "grpo.async_grpo.enabled=true": "unknown key; NeMo-RL's grpo.async_grpo.enabled is grpo.rollouts.mode here"
    " (`synchronous` or `asynchronous`)",
    "grpo.seq_logprob_error_threshold=2": "unknown key; NeMo-RL has it, without a counterpart here:"
    " `loss_fn.importance_sampling_correction: sequence_mask` leaves out responses that training disagrees with",
    "data.promt_key=x": "unknown key; did you mean data.prompt_key?",
    "logger.num_samples_to_prin=3": "unknown key; did you mean logger.num_samples_to_print?",
    "env.reward.tsak=x": "unknown key; did you mean env.reward.task?",
    "grpo.num_generations_per_prompt=0": "got 0 (int), expected a whole number above 0",
    "grpo.adv_estimator.name=rloo": "got 'rloo' (str), expected one of grpo, turn_grpo, gdpo, maxrl,"
    " optimal_token_baseline, reinforce_plus_plus,"
    " reinforce_plus_plus_baseline, reinforce, gae or package.module:name",
    "env.reward_weight={a: 1.0}": "unknown key; did you mean env.reward_weights?",
    "env.reward_weights=[1.0]": "got [1.0] (list), expected a section or null",
    "loss_fn.objective=cipso": "got 'cipso' (str), expected one of clipped, cispo, reinforce, sapo, gmpo, dppo_tv,"
    " dppo_kl, clip_cov, kl_cov or package.module:name;"
    " did you mean cispo?",
    "loss_fn.ratio_clip_min=1.1": "got 1.1 (float), expected a number from 0 to 1",
    "loss_fn.kl_output_clamp_value=0.0": "got 0.0 (float), expected a number above 0 and up to 1000000000 or null",
    "loss_fn.ratio_clip_c=0.5": "got 0.5 (float), expected a number from 1 to 1000000000 or null",
    "loss_fn.force_on_policy_ratio=true": "got true (bool), expected one of auto, always, never",
    "loss_fn.reference_policy_kl_type=k4": "got 'k4' (str), expected one of k1, k2, k3",
    "policy.generation.top_p=1.1": "got 1.1 (float), expected a number above 0 and up to 1",
    "policy.generation.top_p=0": "got 0 (int), expected a number above 0 and up to 1",
    "policy.generation.temperature=0": "got 0 (int), expected a number from 0.01 to 100",
    "policy.generation.stop_token_ids=[1, -1]": "got [1, -1] (list), expected a list of whole numbers or null",
    "policy.generation.stop_strings=stop": "got 'stop' (str), expected a list of texts or null",
    "logger.backends=[csv]": "got ['csv'] (list), expected a list of package.module:name",
    "policy.generation.backend=megatorn": "got 'megatorn' (str), expected one of megatron, megatron_separate, vllm or"
    " package.module:name; did you mean megatron?",
    "env.reward.kind=maths": "got 'maths' (str), expected one of math, exact, reasoning_gym, callable, judge,"
    " reward_model, custom; did you mean math?",
    "env.driver.kind=tool": "got 'tool' (str), expected one of single_turn, function, tools, agent, verifiers,"
    " verifiers_v1, openenv; did you mean tools?",
    "env.reward.timeout_s=.inf": "got inf (float), expected a finite number above 0 and up to 100000000",
    "env.reward.parameters=3": "got 3 (int), expected a section",
    "env.reward=math": "got 'math' (str), expected a section with kind: math, exact, reasoning_gym, callable, judge,"
    " reward_model, custom or null",
    "env.reasoning_gym.task=x": "is now called env.reward.task (with reward.kind reasoning_gym)",
    "~data.answer_key": "missing; expected text that is not empty",
    "sft.seed=1": "unknown key; did you mean grpo.seed?",
}


@pytest.mark.parametrize(
    ("override", "line"),
    [
        *about_keys(REFUSED),
        (
            "env.reward_weights={a: high}",
            "env.reward_weights.a: got 'high' (str), expected a number from -1000000 to 1000000",
        ),
        (
            "env.reward_weights={a: .inf}",
            "env.reward_weights.a: got inf (float), expected a finite number from -1000000 to 1000000",
        ),
        (
            "env.reward_weights={a/b: 1.0}",
            "env.reward_weights.a/b: got the name 'a/b', expected letters, digits, underscores, hyphens and dots, at"
            " most 100",
        ),
    ],
)
def test_one_wrong_input_gives_its_line(grpo_problems_of: Problems, override: str, line: str) -> None:
    assert grpo_problems_of(override) == [line]


def test_sections_of_grpo_mean_nothing_to_sft(problems_of: Problems) -> None:
    for override in ("+policy.generation.top_p=0.9", "+loss_fn.ratio_clip_min=0.2", "+data.answer_key=x"):
        (problem,) = problems_of(override)
        section = override[1:].split("=")[0].rpartition(".")[0]
        assert problem.startswith(f"{section if section != 'data' else 'data.answer_key'}: unknown key")


def test_a_file_started_with_the_wrong_command_is_reported_the_right_one(
    problems_of: Problems, grpo_problems_of: Problems
) -> None:
    assert problems_of(config="grpo_tiny_moe.yaml") == [
        "grpo_tiny_moe.yaml: has a section `grpo`: start it with nemo-rl-moe grpo --config grpo_tiny_moe.yaml"
    ]
    assert grpo_problems_of(config="sft_tiny_moe.yaml") == [
        "sft_tiny_moe.yaml: has a section `sft`: start it with nemo-rl-moe sft --config sft_tiny_moe.yaml"
    ]


def test_the_algorithm_is_known_by_its_section_inherited_ones_too(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("defaults: grpo_tiny_moe.yaml\nenv: {reward: {num_workers: 3}}\n")
    config = load_any_config(own, check_paths=False)
    assert config == load_grpo_config(own, check_paths=False)
    assert load_any_config("sft_tiny_moe.yaml", check_paths=False) == load_config(
        "sft_tiny_moe.yaml", check_paths=False
    )
    own.write_text("policy: {}\n")
    with pytest.raises(ConfigurationError) as caught:
        load_any_config(own, check_paths=False)
    expected = "expected sft or dpo or rm or grpo or ppo or distillation"
    assert caught.value.problems == [f"{own}: has no section of an algorithm, {expected}"]


def test_parameters_of_a_task_are_free() -> None:
    overrides = [
        "env.reward.parameters.min_terms=2",
        "env.reward.parameters.operators=['+', '-']",
        "env.reward.parameters.nested={deep: 1.5}",
    ]
    config = load_grpo_config("grpo_tiny_moe.yaml", overrides, check_paths=False)
    assert isinstance(config.env.reward, ReasoningGymConfig)
    expected = {"min_terms": 2, "operators": ["+", "-"], "nested": {"deep": 1.5}}
    assert config.env.reward.parameters == expected
    assert dump_resolved(config)["env"]["reward"]["parameters"] == expected


def test_a_parameter_of_a_task_is_set_whether_the_file_has_it_or_not(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("defaults: grpo_tiny_moe.yaml\nenv: {reward: {parameters: {min_terms: 4}}}\n")
    config = load_grpo_config(
        own, [f"env.reward.parameters.{name}=2" for name in ("min_terms", "max_terms")], check_paths=False
    )
    assert isinstance(config.env.reward, ReasoningGymConfig)
    assert config.env.reward.parameters == {"min_terms": 2, "max_terms": 2}


def test_kind_is_a_free_name_among_parameters(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("defaults: grpo_tiny_moe.yaml\nenv: {reward: {parameters: {kind: easy, digits: 2}}}\n")
    over = tmp_path / "over.yaml"
    over.write_text("defaults: own.yaml\nenv: {reward: {parameters: {kind: hard}}}\n")
    for path, overrides in ((over, []), (own, ["env.reward.parameters.kind=hard"])):
        config = load_grpo_config(path, overrides, check_paths=False)
        assert isinstance(config.env.reward, ReasoningGymConfig)
        assert config.env.reward.parameters == {"kind": "hard", "digits": 2}


def test_a_section_of_another_kind_is_filled_key_by_key_in_any_order(grpo_problems_of: Problems) -> None:
    assert grpo_problems_of("env.reward.functoin=a:b", "env.reward.kind=callable")[0] == (
        "env.reward.functoin: unknown key; did you mean env.reward.function?"
    )
    config = load_grpo_config(
        "grpo_tiny_moe.yaml", ["env.reward.function=a:b", "env.reward.kind=callable"], check_paths=False
    )
    assert isinstance(config.env.reward, CallableConfig)
    assert config.env.reward.function == "a:b"


def test_missing_files_are_reported(
    grpo_problems_of: Problems, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    problems = grpo_problems_of(check_paths=True)
    assert [problem.split(":")[0] for problem in problems] == [
        "policy.model_name",
        "data.train.path",
        "data.validation.path",
    ]
    sampled = ["data.train.path=null", "data.train.num_items=4", "policy.model_name=Qwen/Qwen3-0.6B"]
    (problem,) = grpo_problems_of(*sampled, check_paths=True)
    assert problem.startswith("data.validation.path: ")
