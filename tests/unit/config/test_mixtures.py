# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Sections of several environments: completed from what they share, checked by their own names, one line a slip."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_rl_moe.checkpoints.changes import changed_keys, wrong_changes
from nemo_rl_moe.config.algorithm import ALGORITHMS, metric_in_force
from nemo_rl_moe.config.environments.rewards import ExactConfig, ReasoningGymConfig
from nemo_rl_moe.config.environments.tools import ToolsConfig
from nemo_rl_moe.config.loading import dump_resolved, load_grpo_config
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.errors import ConfigurationError
from tests.unit.config.conftest import refused

TWO = ("+env.mixture.math={weight: 1.0}", "+env.mixture.code={weight: 2, reward: {kind: exact}}")


def load(*overrides: str, check_paths: bool = False) -> GRPOMasterConfig:
    return load_grpo_config("grpo_tiny_moe.yaml", overrides, check_paths=check_paths)


def test_an_environment_has_what_it_does_not_set_from_the_section_that_all_share() -> None:
    config = load(
        "env.reward.timeout_s=3.0",
        "env.driver={kind: tools, tools: [calculator]}",
        "+env.mixture.math={weight: 1.0}",
        "+env.mixture.code={weight: 2, reward: {kind: exact}, driver: {limits: {num_workers: 3}}}",
        "+env.mixture.code.on_failure=retry",
        "+data.environments.math.prompt_template='{prompt}?'",
        "+data.environments.code={train: {path: code.jsonl}, validation: null, answer_key: solution}",
    )
    math, code = config.env.mixture.values()
    assert isinstance(math.reward, ReasoningGymConfig)
    assert isinstance(code.reward, ExactConfig)
    assert (math.reward.timeout_s, code.reward.timeout_s) == (3.0, 10.0), "another kind begins anew"
    assert isinstance(math.driver, ToolsConfig)
    assert isinstance(code.driver, ToolsConfig)
    assert code.driver.tools == ["calculator"]
    assert (math.on_failure, code.on_failure) == ("leave_out", "retry")
    assert (math.reward.answer_after, code.reward.answer_after) == ("</think>", None)
    assert (code.driver.limits.num_workers, code.driver.limits.call_timeout_s) == (3, 10.0)
    assert config.env.environments == config.env.mixture
    of_math, of_code = config.data.of("math"), config.data.of("code")
    assert (of_math.train, of_math.prompt_template) == (config.data.train, "{prompt}?")
    assert (of_code.train.path, of_code.train.split) == ("code.jsonl", config.data.train.split)
    assert (of_code.validation, of_code.answer_key, of_code.prompt_key) == (None, "solution", "prompt")
    assert [key for key, _ in config.data.sources()] == ["data.environments.math", "data.environments.code"]


def test_dicts_of_an_environment_replace_those_that_all_share() -> None:
    named = {"env.reward": "{kind: callable, function: 'm:f'}", "env.reward_weights": "{a: 1.0, b: 2.0}"}
    shared = [f"{key}={value}" for key, value in named.items()]
    config = load(*shared, "+env.mixture.one={weight: 1.0}", "+env.mixture.two={weight: 1.0, reward_weights: {c: 1.0}}")
    assert [each.reward_weights for each in config.env.mixture.values()] == [{"a": 1.0, "b": 2.0}, {"c": 1.0}]
    assert config.env.shared_reward_weights is None
    same = load(*shared, "+env.mixture.one={weight: 1.0}", "+env.mixture.two={weight: 1.0}")
    assert same.env.shared_reward_weights == {"a": 1.0, "b": 2.0}


def test_without_a_mixture_the_section_is_the_only_environment() -> None:
    config = load()
    assert dict(config.env.environments) == {"": config.env}
    assert list(config.data.sources()) == [("data", config.data)]
    assert config.data.of("") is config.data


def test_a_written_mixture_loads_to_the_same(tmp_path: Path) -> None:
    config = load(*TWO, "+data.environments={math: {}, code: {prompt_key: question}}")
    written = tmp_path / "config.yaml"
    written.write_text(OmegaConf.to_yaml(OmegaConf.create(dump_resolved(config))))
    assert load_grpo_config(written, check_paths=False) == config


@pytest.mark.parametrize(
    ("overrides", "problem"),
    {
        ("+env.mixture.math={weight: 1.0, rewrd: {kind: exact}}",): "env.mixture.math.rewrd: unknown key; did you mean"
        " env.mixture.math.reward?",
        ("+env.mixture.math={}",): "env.mixture.math.weight: missing; expected a number above 0 and up to 1000000",
        ("+env.mixture.math={weight: 0.0}",): "env.mixture.math.weight: got 0.0 (float), expected a number above 0 and"
        " up to 1000000",
        ("+env.mixture.math=exact",): "env.mixture.math: got 'exact' (str), expected a section",
        ("env.mixture=math",): "env.mixture: got 'math' (str), expected a section",
        ("+env.mixture={a b: {weight: 1.0}}",): "env.mixture: got the name 'a b', expected letters, digits, underscores"
        " and hyphens, at most 60",
        (
            "+env.mixture.math={weight: 1.0, driver: {kind: tools, limits: {call_timeout: 3.0}}}",
        ): "env.mixture.math.driver.limits.call_timeout: unknown key; did you mean"
        " env.mixture.math.driver.limits.call_timeout_s?",
        ("+env.mixture.math={weight: 1.0, reward: {kind: callable}}",): "env.mixture.math.reward.function: missing;"
        " expected text that is not empty, or env.mixture.math.reward: null",
        (*TWO, "+data.environments={math: {}, coda: {}, code: {}}"): "data.environments.coda: no environment of"
        " env.mixture, which names math, code; did you mean code?",
        (*TWO, "+data.environments={math: {}}"): "data.environments.code: missing; expected a section such as {train:"
        " {path: prompts.jsonl}}, as there is one for math",
        ("+data.environments.math={}",): "data.environments: got math, expected {} with env.mixture {}: the run"
        " has one environment",
        (*TWO, "data.train.path=prompts.txt"): "data.train.path: got prompts.txt, expected data whose records name an"
        " environment of env.mixture (data.environment_key: environment); or set separate data for each"
        " environment in data.environments",
        (
            *TWO,
            "+data.environments={math: {}, code: {train: {path: null, num_items: 3}}}",
        ): "data.environments.code.train.path: null samples prompts from a reasoning_gym task, but"
        " env.mixture.code.reward is of kind exact; name a file or a dataset",
        (
            *TWO,
            "data.validation=null",
            "+data.environments={math: {}, code: {validation: {path: p, split: s}}}",
        ): "data.environments.code.validation.num_items: missing; expected a whole number above 0 or null, or"
        " data.environments.code.validation: null",
        (*TWO, "+data.environments={math: {validation: null}, code: {validation: null}}"): "data.validation: got a"
        " section, expected null, as no environment of data.environments has held-out prompts",
        (*TWO, "grpo.adv_estimator.name=gdpo", "+env.mixture.math.reward_weights={a: 1.0}"): "grpo.adv_estimator.name:"
        " got gdpo, which normalises each named reward over the step; expected another, or the same reward_weights in"
        " all environments of env.mixture: math, code",
    }.items(),
)
def test_a_slip_is_one_line_with_the_name_of_its_environment(overrides: tuple[str, ...], problem: str) -> None:
    assert problem in refused(load, *overrides)


def test_files_of_each_environment_are_looked_for() -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(
            *TWO,
            "+data.environments={math: {train: {path: a.jsonl}}, code: {validation: {path: b.jsonl}}}",
            check_paths=True,
        )
    found = [problem.partition(":")[0] for problem in caught.value.problems if "not found" in problem]
    assert {"data.environments.math.train.path", "data.environments.code.validation.path"} <= set(found)
    assert "data.train.path" not in found, "nothing reads it"


def test_weights_may_not_change_when_a_run_goes_on() -> None:
    before, now = dump_resolved(load(*TWO)), dump_resolved(load(*TWO, "env.mixture.code.weight=3"))
    wrong = wrong_changes(ALGORITHMS["grpo"], changed_keys(before, now), with_optimizer=True)
    assert list(wrong) == ["env.mixture.code.weight"]
    limits = dump_resolved(load(*TWO, "+env.mixture.code.on_failure=zero"))
    assert not wrong_changes(ALGORITHMS["grpo"], changed_keys(before, limits), with_optimizer=True)
    one_more = dump_resolved(load(*TWO, "+env.mixture.chat={weight: 1.0}"))
    assert "env.mixture.chat.weight" in wrong_changes(
        ALGORITHMS["grpo"], changed_keys(before, one_more), with_optimizer=True
    )


def test_the_best_checkpoint_is_by_accuracy_where_all_environments_say_right_or_wrong() -> None:
    assert metric_in_force(load(*TWO)) == "val:accuracy"
    graded = "+env.mixture.chat={weight: 1.0, reward: {kind: callable, function: 'm:f'}}"
    assert metric_in_force(load(*TWO, graded)) == "val:reward"
