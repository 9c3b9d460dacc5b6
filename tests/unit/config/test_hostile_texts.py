# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Configurations that nobody means, or that take a parser's time or stack: one clear line each, and soon."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_moe.config.loading import load_config
from nemo_rl_moe.config.overrides import resolve
from nemo_rl_moe.config.yaml_text import traps
from nemo_rl_moe.errors import ConfigurationError

Problems = Callable[..., list[str]]
# Each takes half a second; one that follows every way through such a text never ends.
pytestmark = pytest.mark.timeout(120)
SAVE = "checkpointing.save_period"
JITTER = "policy.megatron_cfg.moe_input_jitter_eps"
LR = "policy.megatron_cfg.optimizer.lr"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            f"{SAVE}=1:30",
            f"{SAVE}: YAML reads 1:30 as 90, a number to the base of 60; put a text in quotes, or write 90",
        ),
        (f"{SAVE}=017", f"{SAVE}: YAML reads 017 as 15, a number to the base of 8; put a text in quotes, or write 15"),
        (
            "dpo.x={a: [1, 2:00.5]}",
            "dpo.x: YAML reads 2:00.5 as 120.5, a number to the base of 60; put a text in quotes, or write 120.5",
        ),
        (f"{LR}=1e60", f"{LR}: got 1e+60 (float), expected a number above 0 and up to 10"),
        (f"{LR}=11", f"{LR}: got 11 (int), expected a number above 0 and up to 10"),
        (f"{JITTER}=-5.0", f"{JITTER}: got -5.0 (float), expected a number from 0 up and below 1 or null"),
        (
            "data.load_timeout_s=1e10",
            "data.load_timeout_s: got 10000000000.0 (float), expected a number above 0 and up to 100000000",
        ),
        (f"{SAVE}=" + "[" * 300 + "]" * 300, f"{SAVE}: nested more than 50 levels deep"),
        (f"{SAVE}=" + "{a: " * 300 + "}" * 300, f"{SAVE}: nested more than 50 levels deep"),
        ("+" + "policy." * 400 + "x=1", f"{'policy.' * 8}poli... (2,801 characters): nested more than 50 levels deep"),
        (
            f"{SAVE}=" + "9" * 5000,
            f"{SAVE}: {'9' * 60}... (5,000 characters) is a number of more than 400 digits",
        ),
        ("k" * 100_000 + "=1", f"{'k' * 60}... (100,000 characters): unknown key"),
        ("~sft." + "k" * 100_000, f"~sft.{'k' * 56}... (100,004 characters): no such key"),
        ("k" * 100_000, f"override '{'k' * 60}... (100,000 characters)': expected section.key=value"),
        ("sft.seed=${a", "sft.seed: '${a' is not valid YAML: "),
        (
            'data.train.path="a\\0b"',
            r"data.train.path: got 'a\x00b' (str), expected text that is not empty and can be a",
        ),
        ("data.train.path=" + "x" * 5000, "data.train.path: got 'xxxxxxxxx"),
        ("checkpointing.checkpoint_dir=./" + "x" * 256, "checkpointing.checkpoint_dir: got './xxxxxx"),
        ("logger.log_dir=" + "x/" * 2100, "logger.log_dir: got 'x/x/x/"),
    ],
)
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
        ("sft: " + "{a: " * 300 + "}" * 300, ", line 1: nested more than 50 levels deep"),
        ("\n".join("  " * depth + "a:" for depth in range(300)), ", line 51: nested more than 50 levels deep"),
        ("sft: {seed: " + "1" * 5000 + "}", f", line 1: {'1' * 60}... (5,000 characters) is a number of more than 400"),
        ('defaults: "a\\0b"', ": defaults: 'a\\x00b': no such file: the name holds a NUL character"),
        (
            f"defaults: {'x' * 5000}",
            f": defaults: '{'x' * 60}... (5,000 characters)': no such file: the name is longer",
        ),
        ("defaults: sft.yaml\nsft: {max_num_steps: 3}\nz: ['${a']", ": z.0: '${a' is not valid: "),
        ("a: {b: ${c.d}}", ", line 1, column "),
    ],
)
def test_a_file_gives_one_line(tmp_path: Path, text: str, line: str) -> None:
    (problem,) = in_file(tmp_path, text)
    assert problem.startswith(line)


def test_files_that_many_inherit_from_are_read_once(tmp_path: Path) -> None:
    for level in range(16):  # 2^16 ways lead to the last one
        parent = f"{level + 1}.yaml" if level < 15 else "sft_tiny_moe.yaml"
        (tmp_path / f"{level}.yaml").write_text(f"defaults: [{parent}, {parent}]\n")
    assert load_config(tmp_path / "0.yaml", check_paths=False) == load_config("sft_tiny_moe.yaml", check_paths=False)


def test_a_long_chain_of_files_is_reported(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"{number}.yaml").write_text(f"defaults: {number + 1}.yaml\n")
    (problem,) = in_file(tmp_path, "defaults: 0.yaml\n")
    assert problem == f": defaults go through more than 20 files, to {tmp_path / '19.yaml'}"


def test_an_interpolation_that_braces_tear_apart_gets_a_hint(tmp_path: Path) -> None:
    (problem,) = in_file(tmp_path, "a: {b: ${c.d}}")
    assert problem.endswith('inside of {...} and [...], put "${...}" in quotes')


def test_keys_that_name_others_twice_are_reported_before_they_are_followed(tmp_path: Path) -> None:
    doubling = [f"z{number}: ${{z{number - 1}}}${{z{number - 1}}}" for number in range(1, 26)]
    problems = in_file(tmp_path, "defaults: sft_tiny_moe.yaml\nz0: x\n" + "\n".join(doubling))
    reported = [problem for problem in problems if "names keys that name others, in all more than 1,000" in problem]
    # 2 + 4 + ... + 2^9 is more.
    assert [problem.split(":")[0] for problem in reported] == [f"z{number}" for number in range(9, 26)]


@pytest.mark.parametrize("num_keys", [1, 3, 40, 3000])
def test_circles_of_any_length_are_reported(num_keys: int) -> None:
    ring = {f"z{n}": f"${{z{(n + 1) % num_keys}}}${{z{(n + 1) % num_keys}}}" for n in range(num_keys)}
    _, problems = resolve(ring)
    assert len(problems) == num_keys
    assert all("names keys that name others, in a circle" in problem for problem in problems.values())


def test_a_long_unknown_key_of_a_file_is_cut(tmp_path: Path) -> None:
    key = "k" * 100_000
    (problem,) = in_file(tmp_path, f"defaults: sft_tiny_moe.yaml\n? {key}\n: 1\n")
    assert problem.startswith(f"{'k' * 60}... (100,000 characters): unknown key; allowed here: ")


@pytest.mark.full
def test_a_file_of_unknown_keys_is_reported_soon(tmp_path: Path) -> None:
    text = "\n".join(f"unknown_key_{number}: 1" for number in range(3000))
    problems = in_file(tmp_path, f"defaults: sft_tiny_moe.yaml\n{text}\n")
    assert len(problems) == 21
    assert all("unknown key; allowed here: " in problem for problem in problems[:20])
    assert problems[20] == "and 2,980 further unknown keys: unknown_key_20, ..."


def test_a_configuration_whose_name_no_file_can_have() -> None:
    for name, why in (("a\0b", "holds a NUL character"), ("x" * 5000, "is longer than a file's name can be")):
        with pytest.raises(ConfigurationError, match=why):
            load_config(name)
