# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments by name, and what the driver finds before a worker starts."""

import pytest

from nemo_rl_moe.config.environments.rewards import WorkerRewardConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.rewards.interface import Score
from nemo_rl_moe.rewards.registry import AnswerReward, make_reward_function
from tests.support.custom_parts import NAME
from tests.support.grpo_inputs import environment_section

ARITHMETIC = {"task": "basic_arithmetic", "parameters": {}, "partial_credit": False}
SIGNATURE = f"env.reward.factory: {NAME}:Digits(least: int, step: float = 0.25) -> None"


def made(kind: str, keys: dict[str, object] | None = None, **changes: object) -> AnswerReward:
    """Makes the reward function of a kind with keys of its own."""
    env = environment_section({"kind": kind, **(keys or {})}, **changes)
    assert isinstance(env.reward, WorkerRewardConfig)
    return make_reward_function(env.reward, env)


def test_one_of_ones_own_is_made_of_its_parameters(item_of):
    environment = made("custom", {"factory": f"{NAME}:Digits", "parameters": {"least": 2}})
    assert environment.score(item_of("a 12")) == Score(0.5, True)
    assert environment.score(item_of("a 1")) == Score(0.25, False)


@pytest.mark.parametrize(
    ("kind", "keys", "response"),
    [
        ("math", {}, "is $606$"),
        ("reasoning_gym", ARITHMETIC, " 606"),
        ("callable", {"function": "tests.support.rewards_of_tests:score"}, "1.0"),
    ],
)
def test_each_scores_the_answer_only(item_of, kind, keys, response):
    environment = made(kind, {**keys, "answer_after": "</think>"})
    record = {"answer": "606", "metadata": {}}
    assert environment.score(item_of(f"raise</think>{response}", **record)) == Score(1.0, True)
    assert environment.score(item_of(response, is_truncated=True, **record)) == Score(0.0, False)


def test_weights_by_name_are_those_of_a_rollout_where_the_environment_gives_one_number(item_of):
    environment = made("math", reward_weights={"accuracy": 1.0, "format": 0.5})
    assert environment.score(item_of("606", is_truncated=True, answer="606")) == Score(0.0, False)


@pytest.mark.parametrize(
    ("kind", "keys", "problem"),
    [
        ("reasoning_gym", {**ARITHMETIC, "task": "x"}, "env.reward.task: "),
        ("callable", {"function": "no_such:score"}, "env.reward.function: "),
        ("custom", {"factory": "no_such:Digits"}, "env.reward.factory: no_such:Digits: there is no module no_such, "),
        (
            "custom",
            {"factory": f"{NAME}:Digit"},
            f"env.reward.factory: {NAME}:Digit: {NAME} has no Digit; did you mean Digits?",
        ),
        (
            "custom",
            {"factory": f"{NAME}:NOT_CALLABLE"},
            f"env.reward.factory: {NAME}:NOT_CALLABLE is 3 (int), expected a function",
        ),
        (
            "custom",
            {"factory": f"{NAME}:Digits"},
            f"{SIGNATURE} cannot be called with no argument; env.reward.parameters names its arguments, and for a"
            " function that scores, set env.reward.kind=callable: missing",
        ),
        (
            "custom",
            {"factory": f"{NAME}:Digits", "parameters": {"lest": 2}},
            f"{SIGNATURE} cannot be called with env.reward.parameters (lest):",
        ),
        (
            "custom",
            {"factory": f"{NAME}:makes_a_number"},
            f"env.reward.factory: {NAME}:makes_a_number makes 3 (int), expected a reward function with",
        ),
        (
            "custom",
            {"factory": f"{NAME}:raising"},
            f"env.reward.factory: {NAME}:raising raised while making the reward function: KeyError: 'no such key'",
        ),
    ],
)
def test_what_the_driver_finds(kind, keys, problem):
    with pytest.raises(ConfigurationError) as error:
        made(kind, keys)
    assert error.value.problems[0].startswith(problem)
