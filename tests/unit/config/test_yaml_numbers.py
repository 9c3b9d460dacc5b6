# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Numbers of YAML that mean something else, and malformed interpolations: one clear line each."""

from pathlib import Path

import pytest

from nemo_rl_moe.config.files import traps
from nemo_rl_moe.config.loading import load_config
from nemo_rl_moe.errors import ConfigurationError
from tests.unit.config.conftest import Problems, about_keys

SAVE = "checkpointing.save_period"
JITTER = "policy.megatron_cfg.moe_input_jitter_eps"
LR = "policy.megatron_cfg.optimizer.lr"


REFUSED = {
    f"{SAVE}=1:30": "YAML reads 1:30 as 90, a number to the base of 60; put a text in quotes, or write 90",
    f"{SAVE}=017": "YAML reads 017 as 15, a number to the base of 8; put a text in quotes, or write 15",
    "dpo.x={a: [1, 2:00.5]}": "YAML reads 2:00.5 as 120.5, a number to the base of 60; put a text in quotes, or write"
    " 120.5",
    f"{LR}=1e60": "got 1e+60 (float), expected a number above 0 and up to 10",
    f"{LR}=11": "got 11 (int), expected a number above 0 and up to 10",
    f"{JITTER}=-5.0": "got -5.0 (float), expected a number from 0 up and below 1 or null",
    "data.load_timeout_s=1e10": "got 10000000000.0 (float), expected a number above 0 and up to 100000000",
    "sft.seed=${a": "'${a' is not valid YAML: ",
}


@pytest.mark.parametrize(("override", "line"), about_keys(REFUSED))
def test_an_override_gives_one_line(problems_of: Problems, override: str, line: str) -> None:
    problem, *others = problems_of(override, check_paths=True)
    assert problem.startswith(line)
    assert len(problem) < 500
    # Of the data that is not there.
    assert all(other.startswith("data.") and "not found" in other for other in others)


def in_file(folder: Path, text: str) -> list[str]:
    path = folder / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        load_config(path, check_paths=False)
    assert all(len(problem) < 600 for problem in caught.value.problems)
    return [problem.removeprefix(str(path)) for problem in caught.value.problems]


def test_numbers_of_yaml_that_nobody_means_are_all_reported_with_their_lines(tmp_path: Path) -> None:
    text = "defaults: sft_tiny_moe.yaml\ncheckpointing:\n  save_period: 1:30\nsft:\n  seed: 0_17\n  val_period: 007\n"
    assert in_file(tmp_path, text) == [
        ", line 3: YAML reads 1:30 as 90, a number to the base of 60; put a text in quotes, or write 90",
        ", line 5: YAML reads 0_17 as 15, a number to the base of 8; put a text in quotes, or write 15",
    ]


def test_numbers_and_texts_that_mean_what_they_say_are_let_through() -> None:
    for text in ("a: '1:30'", "a: '017'", "a: 1_000", "a: 0", "a: 00", "a: 1e-3", "a: 089", "a: 1:75", "a: 12:30:61x"):
        assert traps(text) == [], text
    assert traps("a: [1, 2") == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("defaults: sft.yaml\nsft: {max_num_steps: 3}\nz: ['${a']", ": z[0]: not valid: "),
        ("a: {b: ${c.d}}", ", line 1, column "),
    ],
)
def test_a_file_gives_one_line(tmp_path: Path, text: str, line: str) -> None:
    (problem,) = in_file(tmp_path, text)
    assert problem.startswith(line)


def test_an_interpolation_that_braces_tear_apart_gets_a_hint(tmp_path: Path) -> None:
    (problem,) = in_file(tmp_path, "a: {b: ${c.d}}")
    assert problem.endswith('inside of {...} and [...], put "${...}" in quotes')
