# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments by name, and what the driver finds before a worker starts."""

from typing import get_args

import pytest

from nemo_rl_moe.config.schema_grpo import EnvironmentConfig
from nemo_rl_moe.environments.interface import Score
from nemo_rl_moe.environments.registry import ENVIRONMENTS, make_scorer
from nemo_rl_moe.errors import ConfigurationError

ARITHMETIC = {"task": "basic_arithmetic", "parameters": {}, "partial_credit": False}


def test_every_name_of_the_schema_is_registered():
    assert set(ENVIRONMENTS) == set(get_args(EnvironmentConfig.model_fields["name"].annotation))


@pytest.mark.parametrize(
    ("name", "sections", "response"),
    [
        ("math", {}, "is $606$"),
        ("reasoning_gym", {"reasoning_gym": ARITHMETIC}, " 606"),
        ("callable", {"callable": {"function": "tests.support.broken_environments:score"}}, "1.0"),
    ],
)
def test_each_scores_the_answer_only(env_config, item_of, name, sections, response):
    environment = make_scorer(env_config(name, answer_after="</think>", **sections))
    record = {"answer": "606", "metadata": {}}
    assert environment.score(item_of(f"raise</think>{response}", **record)) == Score(1.0, True)
    assert environment.score(item_of(response, is_truncated=True, **record)) == Score(0.0, False)


def test_weights_by_name_are_those_of_a_rollout_where_the_environment_gives_one_number(env_config, item_of):
    environment = make_scorer(env_config("math", reward_weights={"accuracy": 1.0, "format": 0.5}))
    assert environment.score(item_of("606", is_truncated=True, answer="606")) == Score(0.0, False)


@pytest.mark.parametrize(
    ("name", "sections", "problem"),
    [
        ("reasoning_gym", {"reasoning_gym": {**ARITHMETIC, "task": "x"}}, "env.reasoning_gym.task: "),
        ("callable", {"callable": {"function": "no_such:score"}}, "env.callable.function: "),
    ],
)
def test_what_the_driver_finds(env_config, name, sections, problem):
    with pytest.raises(ConfigurationError) as error:
        make_scorer(env_config(name, **sections))
    assert error.value.problems[0].startswith(problem)
