# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
from functools import partial
from typing import Any

import pytest

from nemo_rl_moe.config import overrides
from nemo_rl_moe.config.files import exemplar_names, find_config, read_with_defaults
from nemo_rl_moe.config.loading import load_config
from nemo_rl_moe.config.overrides import apply_overrides, resolve
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.validation import keys_around
from tests.unit.config.conftest import about_keys

GENERATION = "cluster.roles.generation"


def test_set_add_and_remove_in_order_without_touching_the_input() -> None:
    config = {"a": {"b": 1, "c": 2}, "d": None}
    changed, problems = apply_overrides(config, ["a.b=5", "+a.e.f=[1, 2e-1]", "~a.c", "d=x=y", "a.b=6"], lambda *_: [])
    assert problems == []
    assert changed == {"a": {"b": 6, "e": {"f": [1, 0.2]}}, "d": "x=y"}
    assert config == {"a": {"b": 1, "c": 2}, "d": None}


def test_key_must_exist_in_the_file_or_the_schema() -> None:
    changed, problems = apply_overrides({"a": {"bcd": 1}}, ["a.bce=5", "a.new=1", "a.zzz=1"], lambda *_: ["a.new"])
    assert changed == {"a": {"bcd": 1, "new": 1}}
    assert problems == ["a.bce: unknown key; did you mean a.bcd?", "a.zzz: unknown key; allowed here: new, bcd"]


def test_a_value_can_be_null_and_a_section_can_be_replaced() -> None:
    overrides = ["sft.max_num_steps=null", "data.validation={path: held_out, split: test}"]
    config = load_config("sft_tiny_moe.yaml", overrides, check_paths=False)
    assert config.sft.max_num_steps is None
    assert config.data.validation is not None
    assert config.data.validation.path == "held_out"


def test_removed_and_given_again() -> None:
    config = load_config("sft_tiny_moe.yaml", ["~sft.seed", "+sft.seed=9"], check_paths=False)
    assert config.sft.seed == 9


def test_override_acts_before_interpolation() -> None:
    config = load_config("sft_tiny_moe.yaml", ["policy.model_name=a/b"], check_paths=False)
    assert config.policy.tokenizer.name == "a/b"


def test_an_algorithm_is_named_in_the_file() -> None:
    _, problems = apply_overrides({"grpo": {"seed": 1}}, ["algorithm=my_module:ALGORITHM"], lambda *_: ["grpo.seed"])
    assert problems == ["algorithm: can only be set in the file, which `nemo-rl-moe run --config FILE` starts"]


@pytest.mark.parametrize("name", exemplar_names())
def test_plain_references_resolve_as_omegaconf_resolves_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    merged = read_with_defaults(find_config(name)) | {"none": None, "of": ["${none}", "${policy.precision}"]}
    found = resolve(merged)
    assert overrides._plainly_resolved(merged) == found[0], "OmegaConf was not needed"
    monkeypatch.setattr(overrides, "_plainly_resolved", lambda config: None)
    assert found == resolve(merged)
    assert found[0]["of"] == [None, merged["policy"]["precision"]]
    assert merged["of"] == ["${none}", "${policy.precision}"]


@pytest.mark.parametrize(
    "text", ["a ${policy.precision}", "${.precision}", "${policy}", "${alias}", "${not.there}", r"\${policy.precision}"]
)
def test_other_references_are_left_to_omegaconf(text: str) -> None:
    values = {"policy": {"precision": "float32", "text": text}, "alias": "${policy.precision}"}
    assert overrides._plainly_resolved(values) is None


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("cluster.roles.generation.cpu_workers_per_node=1", "cluster.roles.generation", {"cpu_workers_per_node": 1}),
        ("policy.megatron_cfg.env_vars.NCCL_DEBUG=INFO", "policy.megatron_cfg.env_vars", {"NCCL_DEBUG": "INFO"}),
        ("env.driver.parameters.python.timeout_s=3", "env.driver.parameters", {"python": {"timeout_s": 3}}),
        ("env.reward.parameters.a.b.c=3", "env.reward.parameters", {"a": {"b": {"c": 3}}}),
        ("env.reward_weights.format=0.5", "env.reward_weights", {"format": 0.5}),
        ("env.driver.mcp_servers.files.command=ls", "env.driver.mcp_servers", {"files": {"command": "ls"}}),
        ("data.environments.a.train.path=x", "data.environments", {"a": {"train": {"path": "x"}}}),
    ],
)
def test_keys_below_a_mapping_need_no_plus(override: str, path: str, value: Any) -> None:
    changed, problems = apply_overrides({}, [override], partial(keys_around, GRPOMasterConfig))
    assert problems == []
    for part in path.split("."):
        changed = changed[part]
    assert changed == value


@pytest.mark.parametrize(
    ("override", "problem"),
    about_keys(
        {
            f"{GENERATION}.cpu_worker_per_node=1": f"unknown key; did you mean {GENERATION}.cpu_workers_per_node?",
            **dict.fromkeys(("policy.megatron_cfg.env_vars.A.B=1", "policy.megatron_cfg.env_var.A=1"), "unknown key"),
            "logger.log_dir.x=1": "unknown key",
        }
    ),
)
def test_keys_that_a_mapping_has_not_are_unknown(override: str, problem: str) -> None:
    _, problems = apply_overrides({}, [override], partial(keys_around, GRPOMasterConfig))
    assert len(problems) == 1
    assert problems[0].startswith(problem)


@pytest.mark.parametrize("value", ["", "  "])
def test_a_value_that_is_not_there_is_no_null(value: str) -> None:
    _, problems = apply_overrides({"grpo": {"max_num_steps": 3}}, [f"grpo.max_num_steps={value}"], lambda *_: [])
    assert problems == [
        "grpo.max_num_steps: nothing follows the = (is a shell variable not set?); expected a value, or null"
    ]


def test_bytes_that_are_no_text_are_named() -> None:
    _, problems = apply_overrides({"a": 1}, ["a=x\udcff"], lambda *_: [])
    assert len(problems) == 1
    assert problems[0].endswith("is not valid YAML: it holds bytes that are not UTF-8")
