# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Names of a user's own code in messages: a dot where a colon is meant, and no addresses of objects."""

import sys
from functools import partial
from pathlib import Path

import pytest

from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.config.user_code import described, import_attribute, with_colon
from nemo_rl_moe.errors import ConfigurationError, one_line
from tests.unit.config.conftest import refused


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("grpo.adv_estimator.name", "parts.rank_advantage"),
        ("loss_fn.objective", "parts.rank_advantage"),
        ("policy.generation.backend", "parts.rank_advantage"),
        ("grpo.rollouts.order", "parts.rank_advantage"),
        ("logger.backends", "[parts.rank_advantage]"),
    ],
)
def test_a_dot_for_a_colon_has_the_right_name_as_suggestion(key: str, value: str) -> None:
    line = next(
        problem
        for problem in refused(load_grpo_config, "grpo_tiny_moe.yaml", [f"{key}={value}"], check_paths=False)
        if problem.startswith(f"{key}: got ")
    )
    assert line.endswith("package.module:name; did you mean parts:rank_advantage?")


@pytest.mark.parametrize("written", ["parts.Reward", "parts:Reward"])
def test_code_in_place_of_a_kind_is_told_the_kind_that_takes_it(written: str) -> None:
    assert refused(load_grpo_config, "grpo_tiny_moe.yaml", [f"env.reward.kind={written}"], check_paths=False)[
        0
    ].endswith("custom; did you mean custom, with factory: parts:Reward?")


def test_a_reference_that_is_imported_has_it_too() -> None:
    with pytest.raises(ConfigurationError, match=r"expected package\.module:function; did you mean parts:turns\?$"):
        import_attribute("env.driver.function", "parts.turns")


@pytest.mark.parametrize("name", ["grpoo", "a b.c", "parts.", ".x", ""])
def test_other_words_are_no_such_reference(name: str) -> None:
    assert with_colon(name) is None


def test_objects_are_shown_without_their_addresses() -> None:
    assert described(with_colon) == "<function with_colon> (function)"
    assert " at 0x" not in described([partial(with_colon, "a"), object()])
    assert one_line(TypeError(f"{object()!r} is odd, at 0x10")) == "TypeError: <object object> is odd, at 0x10"


@pytest.mark.parametrize("reference", ["os:system", "builtins:len", "os.path:join"])
def test_python_s_own_library_is_no_code_of_the_user(reference: str) -> None:
    assert refused(import_attribute, "env.driver.program", reference) == [
        f"env.driver.program: {reference} is of Python's own library, expected package.module:function of your own code"
    ]


def test_a_module_of_the_user_may_have_a_name_of_python_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "this.py").write_text("def score(item): return 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "this", raising=False)
    assert import_attribute("env.reward.function", "this:score")(None) == 1
