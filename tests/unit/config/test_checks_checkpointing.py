# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules of the `checkpointing` section: each is broken and reported in one line, with the nearest right value."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_moe.config.algorithm import metric_in_force
from nemo_rl_moe.config.loading import load_any_config, load_config, load_grpo_config
from nemo_rl_moe.config.schema_run import format_duration, parse_duration
from nemo_rl_moe.errors import ConfigurationError
from tests.unit.config.conftest import Problems, about_keys

C = "checkpointing"
DURATION = 'expected DD:HH:MM:SS such as "00:03:30:00" (3 hours 30 minutes), or null'
NO_VALIDATION = ("sft.val_period=0", "sft.val_at_end=false")


REFUSED = {
    f"{C}.metric_name=val/accuracy": "got 'val/accuracy', expected auto, val:NAME or train:NAME, or null; did you mean"
    " val:accuracy?",
    f"{C}.metric_name=accuracy": "got 'accuracy', expected auto, val:NAME or train:NAME, or null",
    f"{C}.metric_name=atuo": "got 'atuo', expected auto, val:NAME or train:NAME, or null; did you mean auto?",
    f"{C}.higher_is_better=false": f"false needs a metric of which less is better, such as {C}.metric_name val:loss;"
    " got auto, which is val:accuracy",
    f"{C}.metric_name=training.loss": "got 'training.loss', expected auto, val:NAME or train:NAME, or null; did you"
    " mean train:loss?",
    f"{C}.checkpoint_must_save_by='3:30:00'": f"got '3:30:00', {DURATION}; did you mean \"00:03:30:00\"?",
    f"{C}.checkpoint_must_save_by='00:27:00:00'": f"got '00:27:00:00', {DURATION}; did you mean \"01:03:00:00\"?",
    f"{C}.checkpoint_must_save_by=4h": f"got '4h', {DURATION}",
    f"{C}.checkpoint_must_save_by='00:00:00:00'": "got '00:00:00:00', expected a time above 0 such as \"00:03:30:00\","
    " or null",
    f"{C}.checkpoint_must_save_by=1:00:00:00": "YAML reads 1:00:00:00 as 216000, a number to the base of 60; put a text"
    " in quotes, or write 216000",
    f"{C}.checkpoint_dir=/": "got /, expected a folder for this run's checkpoints alone",
    f"{C}.keep_top_k=0": "got 0 (int), expected a whole number above 0 or null",
    f"{C}.save_period=-1": "got -1 (int), expected a whole number from 0 up",
    f"{C}.resume=newest": "got 'newest' (str), expected auto or never",
    f"{C}.resume=nevre": "got 'nevre' (str), expected auto or never; did you mean never?",
}
REFUSED_TOGETHER: dict[tuple[str, ...], str] = {
    NO_VALIDATION: f"{C}.metric_name: val:accuracy needs a validation, but sft.val_period is 0 and sft.val_at_end"
    " false; switch one on, or set null (keep the newest) or train:NAME",
    (f"{C}.enabled=false", f"{C}.checkpoint_must_save_by='00:01:00:00'"): f"{C}.checkpoint_must_save_by: needs"
    f" {C}.enabled true; set null for no time limit",
    (f"{C}.enabled=false", "cluster.max_restarts=3"): f"cluster.max_restarts: 3 needs {C}.enabled true: a restart goes"
    " on from a checkpoint; set 0 for no restarts",
}


@pytest.mark.parametrize(
    ("overrides", "line"), [*(((override,), line) for override, line in about_keys(REFUSED)), *REFUSED_TOGETHER.items()]
)
def test_broken_rule_gives_its_one_line(problems_of: Problems, overrides: tuple[str, ...], line: str) -> None:
    assert problems_of(*overrides) == [line]


@pytest.mark.parametrize(
    "overrides",
    [
        (*NO_VALIDATION, f"{C}.metric_name=train:loss", f"{C}.higher_is_better=false"),
        (*NO_VALIDATION, f"{C}.metric_name=null"),
        (*NO_VALIDATION, f"{C}.keep_top_k=null"),
        (*NO_VALIDATION, f"{C}.enabled=false"),
        ("sft.val_period=0",),
        (f"{C}.metric_name='train:moe/layer_2/z_loss'",),
        (f"{C}.checkpoint_must_save_by='00:03:30:00'",),
        (f"{C}.save_period=0", f"{C}.save_optimizer=false", "cluster.max_restarts=2"),
    ],
)
def test_what_works_is_let_through(overrides: tuple[str, ...]) -> None:
    load_config("sft_tiny_moe.yaml", overrides, check_paths=False)


def test_the_rule_names_the_section_of_the_algorithm(grpo_problems_of: Problems) -> None:
    (problem,) = grpo_problems_of("grpo.val_period=0", "grpo.val_at_end=false")
    assert "grpo.val_period is 0 and grpo.val_at_end false" in problem
    load_grpo_config("grpo_tiny_moe.yaml", ["grpo.val_period=0"], check_paths=False)


@pytest.mark.parametrize(
    "name", ["sft_qwen3_30b_a3b.yaml", "sft_tiny_moe.yaml", "grpo_math_1B.yaml", "grpo_tiny_moe.yaml"]
)
def test_exemplars_keep_the_best_of_what_they_measure(name: str) -> None:
    config = load_any_config(name, check_paths=False)
    loop = getattr(config, name.split("_")[0].removesuffix(".yaml"))
    # Each checkpoint but a stopped run's last one is saved at a step that is validated.
    assert config.checkpointing.save_period % loop.val_period == 0
    assert metric_in_force(config) == "val:accuracy"


@pytest.mark.parametrize(
    ("overrides", "metric"),
    [
        (("env.reward.kind=math",), "val:accuracy"),
        (("env.reward.partial_credit=true",), "val:reward"),
        (("env.reward.kind=callable", "env.reward.function=a:b"), "val:reward"),
        (("env.driver.kind=function", "env.driver.function=a:b"), "val:reward"),
        (("env.reward.kind=callable", "env.reward.function=a:b", f"{C}.metric_name=val:accuracy"), "val:accuracy"),
        ((f"{C}.metric_name=null",), None),
    ],
)
def test_graded_rewards_choose_by_the_reward(overrides: tuple[str, ...], metric: str | None) -> None:
    assert metric_in_force(load_grpo_config("grpo_tiny_moe.yaml", overrides, check_paths=False)) == metric


@given(st.integers(0, 1000 * 86400 - 1))
def test_durations_round_trip(seconds: int) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


def test_a_duration_by_hand() -> None:
    assert parse_duration("01:02:03:04") == 86400 + 2 * 3600 + 3 * 60 + 4
    assert [parse_duration(text) for text in ("00:24:00:00", "00:00:60:00", "00:00:00:60", "1:2:3", "", "a:b:c:d")] == [
        None
    ] * 6


def test_a_folder_that_cannot_be_made_is_reported_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where no demo has left its data
    (tmp_path / "file").write_text("")
    name = tmp_path / "file" / "runs"
    with pytest.raises(ConfigurationError) as error:
        load_config("sft_tiny_moe.yaml", [f"{C}.checkpoint_dir={name}", f"logger.log_dir={name}"])
    why = f"got {name}, and {tmp_path / 'file'} is no folder; expected a folder that you may write to"
    assert {f"{C}.checkpoint_dir: {why}", f"logger.log_dir: {why}"} <= set(error.value.problems)
    with pytest.raises(ConfigurationError) as error:  # of the data, which is not there
        load_config("sft_tiny_moe.yaml", [f"{C}.checkpoint_dir={tmp_path}/a/b"])
    assert not [line for line in error.value.problems if line.startswith(C)]


@pytest.fixture
def unwritable(tmp_path: Path) -> Iterator[Path]:
    """A folder that this process may look into and not write to. Root may write anywhere: it asks as somebody else."""
    folder = tmp_path / "others"
    folder.mkdir(mode=0o555)
    is_root = os.geteuid() == 0
    if is_root:
        os.setreuid(65534, -1)  # whom os.access asks for; files are opened as before
    yield folder
    if is_root:
        os.setreuid(0, -1)


def test_folders_that_may_not_be_written_to_are_reported_before_anything_starts(unwritable: Path) -> None:
    name = unwritable / "a" / "b"
    with pytest.raises(ConfigurationError) as error:
        load_config("sft_tiny_moe.yaml", [f"{C}.checkpoint_dir={name}", f"logger.log_dir={name}"])
    why = f"got {name}, and {unwritable} may not be written to; expected a folder that you may write to"
    assert {f"{C}.checkpoint_dir: {why}", f"logger.log_dir: {why}"} <= set(error.value.problems)
