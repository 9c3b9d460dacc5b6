# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions of the user's own: found or refused on the driver, and what they may return."""

import sys
from fractions import Fraction

import numpy as np
import pytest

from nemo_rl_moe.config.environments.rewards import CallableConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.rewards.interface import Score
from nemo_rl_moe.rewards.user_callable import CallableReward

MODULE = """
import math
result = None
NUMBER = 3
def score(item):
    return result
def two(item, other):
    return 1.0
async def later(item):
    return 1.0
class Judge:
    def __call__(self, item):
        return float(len(item.response))
    @staticmethod
    def strict(item):
        return 0.0
judge = Judge()
class Near:
    def __init__(self, tolerance):
        pass
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module in the working folder, which is not on the path of an installed program."""
    (tmp_path / "my_rewards.py").write_text(MODULE)
    (tmp_path / "broken_rewards.py").write_text("import no_such_library")
    (tmp_path / "exiting_rewards.py").write_text("raise SystemExit('not today')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    before = set(sys.modules)
    yield lambda: sys.modules["my_rewards"]
    for name in set(sys.modules) - before:
        if name.endswith("rewards"):
            del sys.modules[name]


def environment(function):
    return CallableReward(
        CallableConfig(kind="callable", function=function, num_workers=1, timeout_s=60.0, answer_after=None)
    )


@pytest.mark.parametrize(
    ("result", "score"),
    [
        (1.0, Score(1.0, True)),
        (0.99, Score(0.99, False)),
        (2, Score(2.0, True)),
        (-1.5, Score(-1.5, False)),
        (True, Score(1.0, True)),
        (Fraction(1, 2), Score(0.5, False)),
        (np.float32(0.5), Score(0.5, False)),
        ((0.25, True), Score(0.25, True)),
        ((1, False), Score(1.0, False)),
        ((np.float64(1.0), np.bool_(False)), Score(1.0, False)),
        ({"accuracy": 1, "format": 0.5}, Score.named({"accuracy": 1.0, "format": 0.5}, is_correct=True)),
        (
            {"format": np.float32(0.5), "accuracy": True},
            Score.named({"format": 0.5, "accuracy": 1.0}, is_correct=False),
        ),
        (({"accuracy": 1.0}, False), Score.named({"accuracy": 1.0}, is_correct=False)),
    ],
)
def test_results(module, item_of, result, score):
    reward_function = environment("my_rewards:score")
    module().result = result
    assert reward_function.score(item_of("606")) == score


OTHERS = [None, "1.0", [1.0, True], (1.0,), (1.0, 1), (True, 1.0), (1.0, None), (1.0, True, 2), {}, 1j]


@pytest.mark.parametrize("result", [*OTHERS, {1: 1.0}, {"a": "1"}, {"a": {"b": 1.0}}, ({"a": 1.0}, 1.0), ({}, True)])
def test_other_results_are_errors(module, item_of, result):
    reward_function = environment("my_rewards:score")
    module().result = result
    with pytest.raises(TypeError, match="expected a number, or a dict of numbers by name, or a pair of either and"):
        reward_function.score(item_of("606"))


def test_objects_and_members_that_can_be_called(module, item_of):
    assert environment("my_rewards:judge").score(item_of("606")) == Score(3.0, True)
    assert environment("my_rewards:Judge.strict").score(item_of("606")) == Score(0.0, False)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("my_rewards.score", "got '{}', expected package.module:function"),
        ("my_rewards:", "got '{}', expected package.module:function"),
        ("my-rewards:score", "got '{}', expected package.module:function"),
        ("my_rewards:scor", "{}: my_rewards has no scor; did you mean score?"),
        ("my_rewards:Near", "{} is a class, expected a function; for a class, set env.reward.kind=custom"),
        ("my_rewards:NUMBER", "{} is 3 (int), expected a function"),
        ("my_rewards:later", "{} is a coroutine or generator function, expected a plain function that returns its res"),
        ("my_rewards:two", "{}(item, other) cannot be called with one ScoringItem: missing a required"),
        ("no_such:score", "{}: there is no module no_such, neither installed nor in the working folder"),
        ("my_rewards.deep:score", "{}: there is no module my_rewards.deep, neither installed nor"),
        ("broken_rewards:score", "{}: broken_rewards cannot be imported: ModuleNotFoundError: No mod"),
        ("exiting_rewards:score", "{}: exiting_rewards cannot be imported: SystemExit: not today"),
    ],
)
def test_what_is_refused(module, function, problem):
    with pytest.raises(ConfigurationError) as error:
        environment(function)
    (message,) = error.value.problems
    assert message.startswith(f"env.reward.function: {problem.format(function)}")


def test_an_installed_module_of_the_same_name_is_said(tmp_path, monkeypatch):
    (tmp_path / "graphlib.py").write_text("def score(item):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"which comes before graphlib\.py of the working folder"):
        environment("graphlib:score")
