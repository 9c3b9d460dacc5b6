# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments by name, and what the driver finds before a worker starts."""

from typing import get_args

import pytest

from nemo_rl_moe.config.schema_environment import EnvironmentConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.rewards.interface import Score
from nemo_rl_moe.rewards.registry import REWARD_FUNCTIONS, make_reward_function
from tests.support.custom_parts import NAME

ARITHMETIC = {"task": "basic_arithmetic", "parameters": {}, "partial_credit": False}
SIGNATURE = f"env.name: {NAME}:Digits(least: int, step: float = 0.25) -> None"


def test_every_name_of_the_schema_is_registered():
    names, _ = get_args(EnvironmentConfig.model_fields["name"].annotation)
    drive_trajectories = {"verifiers", "openenv"}
    scores_on_ranks = {"reward_model"}
    assert {*REWARD_FUNCTIONS, *drive_trajectories, *scores_on_ranks} == set(get_args(names))


def test_one_of_ones_own_is_made_of_its_parameters(env_config, item_of):
    environment = make_reward_function(env_config(f"{NAME}:Digits", parameters={"least": 2}))
    assert environment.score(item_of("a 12")) == Score(0.5, True)
    assert environment.score(item_of("a 1")) == Score(0.25, False)


@pytest.mark.parametrize(
    ("name", "sections", "response"),
    [
        ("math", {}, "is $606$"),
        ("reasoning_gym", {"reasoning_gym": ARITHMETIC}, " 606"),
        ("callable", {"callable": {"function": "tests.support.broken_rewards:score"}}, "1.0"),
    ],
)
def test_each_scores_the_answer_only(env_config, item_of, name, sections, response):
    environment = make_reward_function(env_config(name, answer_after="</think>", **sections))
    record = {"answer": "606", "metadata": {}}
    assert environment.score(item_of(f"raise</think>{response}", **record)) == Score(1.0, True)
    assert environment.score(item_of(response, is_truncated=True, **record)) == Score(0.0, False)


def test_weights_by_name_are_those_of_a_rollout_where_the_environment_gives_one_number(env_config, item_of):
    environment = make_reward_function(env_config("math", reward_weights={"accuracy": 1.0, "format": 0.5}))
    assert environment.score(item_of("606", is_truncated=True, answer="606")) == Score(0.0, False)


@pytest.mark.parametrize(
    ("name", "sections", "problem"),
    [
        ("reasoning_gym", {"reasoning_gym": {**ARITHMETIC, "task": "x"}}, "env.reasoning_gym.task: "),
        ("callable", {"callable": {"function": "no_such:score"}}, "env.callable.function: "),
        ("no_such:Digits", {}, "env.name: no_such:Digits: there is no module no_such, "),
        (f"{NAME}:Digit", {}, f"env.name: {NAME}:Digit: {NAME} has no Digit; did you mean Digits?"),
        (f"{NAME}:NOT_CALLABLE", {}, f"env.name: {NAME}:NOT_CALLABLE is 3 (int), expected a function"),
        (
            f"{NAME}:Digits",
            {},
            f"{SIGNATURE} cannot be called with no argument; env.parameters names its arguments, and a function that"
            " scores is env.name callable: missing",
        ),
        (
            f"{NAME}:Digits",
            {"parameters": {"lest": 2}},
            f"{SIGNATURE} cannot be called with env.parameters (lest):",
        ),
        (
            f"{NAME}:makes_a_number",
            {},
            f"env.name: {NAME}:makes_a_number makes 3 (int), expected a reward function with",
        ),
        (f"{NAME}:raising", {}, f"env.name: {NAME}:raising raised while it was made: KeyError: 'no such key'"),
    ],
)
def test_what_the_driver_finds(env_config, name, sections, problem):
    with pytest.raises(ConfigurationError) as error:
        make_reward_function(env_config(name, **sections))
    assert error.value.problems[0].startswith(problem)
