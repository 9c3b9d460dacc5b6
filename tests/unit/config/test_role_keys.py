# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Errors about models beside the policy name the settings that the user writes for them."""

import pytest

from nemo_rl_moe.config.loading import load_any_config
from nemo_rl_moe.config.role_keys import key_of_role, role_problems
from nemo_rl_moe.errors import ConfigurationError

SECOND = ("+distillation.teachers.writer=${distillation.teachers.teacher}", "+cluster.roles.writer={}")
LAYOUT, LONGEST = "megatron_cfg", "policy.max_total_sequence_length"


@pytest.mark.parametrize(
    ("recipe", "overrides", "role", "key"),
    [
        ("ppo_tiny_moe.yaml", (), "critic", "value"),
        ("distillation_tiny_moe.yaml", (), "teacher", "distillation.teachers.teacher"),
        ("distillation_tiny_moe.yaml", SECOND, "writer", "distillation.teachers.writer"),
        ("grpo_tiny_moe_reward_model.yaml", (), "reward_model", "reward_model"),
    ],
)
def test_a_folder_without_a_model_is_reported_at_its_key(
    recipe: str, overrides: tuple[str, ...], role: str, key: str
) -> None:
    settings = [*overrides]
    if role == "writer":
        settings.append("distillation.teacher_key=by")
    config = load_any_config(recipe, settings, check_paths=False)
    assert key_of_role(config, role) == key
    assert role_problems(config, role, ["policy.model_name: the folder x holds no config.json"]) == [
        f"{key}.model_name: the folder x holds no config.json"
    ]


@pytest.mark.parametrize(
    ("of_policy", "of_critic"),
    [
        (f"policy.{LAYOUT}.tensor_model_parallel_size: got 3", f"value.{LAYOUT}.tensor_model_parallel_size: got 3"),
        (
            "cluster: 1 workers cannot be divided by 2 (policy.megatron_cfg: expert_model_parallel_size 2)",
            "cluster.roles.critic: 1 workers cannot be divided by 2 (value.megatron_cfg: expert_model_parallel_size 2)",
        ),
        (
            "policy.megatron_cfg.pipeline_model_parallel_size: got 3, which does not divide the model's 4 layers; "
            "expected, for one, num_layers_in_first_pipeline_stage=1 num_layers_in_last_pipeline_stage=1",
            "value.megatron_cfg.pipeline_model_parallel_size: got 3, which does not divide the model's 4 layers; "
            "expected a divisor of them",
        ),
        ("policy.train_micro_batch_size: got 3", "value.logprob_batch_size: got 3"),
        ("policy.megatron_cfg.optimizer.lr: got 1", "value.lr: got 1"),
        ("policy.lora.rank: got 8, as in policy.lora.path x", "value.lora.rank: got 8, as in value.lora.path x"),
        # A setting that the critic does not have is the policy's, for both.
        (f"{LONGEST}: got 99, expected 64", f"role critic: {LONGEST}: got 99, expected 64"),
    ],
)
def test_other_settings_have_the_names_of_the_critic(of_policy: str, of_critic: str) -> None:
    config = load_any_config("ppo_tiny_moe.yaml", [], check_paths=False)
    assert role_problems(config, "critic", [of_policy]) == [of_critic]


def test_a_frozen_model_has_no_learning_rate() -> None:
    config = load_any_config("distillation_tiny_moe.yaml", [], check_paths=False)
    line = "policy.megatron_cfg.optimizer.lr: got 1"
    assert role_problems(config, "teacher", [line]) == [f"role teacher: {line}"]


def test_the_adapter_of_a_frozen_model_has_one_key() -> None:
    config = load_any_config("distillation_tiny_moe.yaml", [], check_paths=False)
    key = "distillation.teachers.teacher.adapter"
    problems = ["policy.lora.path: x: broken", "policy.lora.targets: got 'o_proj'", "policy.lora: got a section"]
    assert role_problems(config, "teacher", problems) == [
        f"{key}: x: broken",
        f"{key}: got 'o_proj'",
        f"{key}: got a section",
    ]


def test_a_teacher_with_too_many_ranks_names_its_key() -> None:
    teacher = "distillation.teachers.teacher"
    with pytest.raises(ConfigurationError) as caught:
        load_any_config(
            "distillation_tiny_moe.yaml", [f"{teacher}.{LAYOUT}.expert_model_parallel_size=8"], check_paths=False
        )
    (problem,) = caught.value.problems
    assert problem.startswith("cluster.roles.teacher: ")
    assert problem.endswith(f" or lower {teacher}.{LAYOUT}.expert_model_parallel_size to 1")
