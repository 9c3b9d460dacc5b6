# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""YAML files: inheritance, what is missing or malformed, and that nothing in them runs."""

import os
import re
from pathlib import Path

import pytest

from nemo_rl_moe.config.files import find_config, read_with_defaults
from nemo_rl_moe.config.loading import load_config
from nemo_rl_moe.config.overrides import resolve
from nemo_rl_moe.errors import ConfigurationError
from tests.unit.config.conftest import Problems, refused


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def problem_of(path: Path) -> str:
    (problem,) = refused(read_with_defaults, path)
    assert "\n" not in problem
    return problem


def test_later_defaults_win_and_the_file_wins_over_all(tmp_path: Path) -> None:
    write(tmp_path, "one.yaml", "s: {a: 1, b: 1, c: 1, list: [1, 2]}")
    write(tmp_path, "sub/two.yaml", "defaults: three.yaml\ns: {b: 2, c: 2, list: [3]}")
    write(tmp_path, "sub/three.yaml", "s: {d: 3, c: 3}\nt: {x: 1}")
    path = write(tmp_path, "main.yaml", "defaults: [one.yaml, sub/two.yaml]\ns: {c: 4}\nt: null")
    assert read_with_defaults(path) == {"s": {"a": 1, "b": 2, "c": 4, "d": 3, "list": [3]}, "t": None}


def test_shipped_file_is_found_from_anywhere_and_ones_own_of_the_same_name_comes_first(tmp_path: Path) -> None:
    path = write(tmp_path, "mine.yaml", "defaults: sft_tiny_moe.yaml\nsft: {seed: 7}")
    assert load_config(path, check_paths=False).sft.seed == 7
    write(tmp_path, "sft_tiny_moe.yaml", "defaults: sft_tiny_moe.yaml\nlogger: {log_dir: elsewhere}")
    config = load_config(path, check_paths=False)
    assert (config.sft.seed, config.logger.log_dir) == (7, "elsewhere")


def test_a_file_that_two_parents_share_is_no_circle(tmp_path: Path) -> None:
    write(tmp_path, "root.yaml", "a: 1")
    write(tmp_path, "left.yaml", "defaults: root.yaml\nb: 1")
    write(tmp_path, "right.yaml", "defaults: root.yaml\nc: 1")
    both = write(tmp_path, "m.yaml", "defaults: [left.yaml, right.yaml]")
    assert read_with_defaults(both) == {"a": 1, "b": 1, "c": 1}


def test_circle(tmp_path: Path) -> None:
    first = write(tmp_path, "first.yaml", "defaults: second.yaml")
    write(tmp_path, "second.yaml", "defaults: first.yaml")
    assert problem_of(first) == f"{first}: defaults go in a circle: first.yaml -> second.yaml -> first.yaml"
    alone = write(tmp_path, "alone.yaml", "defaults: alone.yaml")
    assert problem_of(alone) == f"{alone}: defaults go in a circle: alone.yaml -> alone.yaml"


def test_missing_parent_names_the_nearest(tmp_path: Path) -> None:
    path = write(tmp_path, "main.yaml", "defaults: sft_tiny.yaml")
    assert problem_of(path) == (
        f"{path}: defaults: sft_tiny.yaml: no such file, neither in {tmp_path} nor among the shipped configurations;"
        " did you mean sft_tiny_moe.yaml?"
    )


def test_missing_file_names_the_nearest(problems_of: Problems) -> None:
    assert problems_of(config="nowhere/sft.yml") == [
        "nowhere/sft.yml: no such file; did you mean sft.yaml? (nemo-rl-moe config --help lists the shipped"
        " configurations)"
    ]


def test_missing_file_names_no_other_that_only_ends_alike(tmp_path: Path, problems_of: Problems) -> None:
    write(tmp_path, "pose.yaml", "defaults: sft_tiny_moe.yaml")
    for path in ("nope.yaml", str(tmp_path / "nope.yaml")):
        assert problems_of(config=path) == [
            f"{path}: no such file (nemo-rl-moe config --help lists the shipped configurations)"
        ]


def test_missing_file_names_the_nearest_beside_it(tmp_path: Path) -> None:
    path = write(tmp_path, "my_run.yaml", "defaults: sft_tiny_moe.yaml")
    with pytest.raises(ConfigurationError, match=re.escape(f"my_rn.yaml: no such file; did you mean {path}?")):
        find_config(tmp_path / "my_rn.yaml")


@pytest.mark.parametrize(
    ("text", "where", "reason"),
    [
        ("a: 1\nb: 2\n c: 3\n", ", line 3, column 3", "mapping values are not allowed"),
        ("a: 1\nb: 2\na: 3\n", ", line 3, column 1", "duplicate key a"),
        ("a: [1, 2\nb: 3\n", ", line 2", "not valid YAML"),
        ("a: 1\n---\nb: 2\n", ", line 2", "another document"),
        ("a: &x {b: *x}\n", ", line 1", "recursive aliases"),
        ("- 1\n- 2\n", "", "expected sections"),
        ("just words", "", "expected sections"),
        ("3", "", "expected sections"),
        ("a: ${b\n", ": a: ", "${b"),
        ("defaults: 3\n", "", "defaults: expected the name of a YAML file"),
        ("defaults: {a: b}\n", "", "defaults: expected the name of a YAML file"),
        ("a: " + "[" * 1000 + "]" * 1000, "", "not valid: brackets or sections are nested too deeply"),
        ("a: " + "9" * 5000, "", "not valid: a number is too long to be read"),
    ],
)
def test_malformed_file_says_where(tmp_path: Path, text: str, where: str, reason: str) -> None:
    path = write(tmp_path, "bad.yaml", text)
    problem = problem_of(path)
    assert problem.startswith(f"{path}{where}")
    assert reason in problem


def test_unreadable_files(tmp_path: Path, problems_of: Problems) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"a: \xff\xfe")
    assert problem_of(binary) == f"{binary}: cannot be read: not UTF-8 text"


def test_empty_file_lacks_every_section(tmp_path: Path, problems_of: Problems) -> None:
    problems = problems_of(config=write(tmp_path, "empty.yaml", ""))
    sections = ["checkpointing", "policy", "logger", "cluster", "data", "sft"]
    assert [problem.split(":")[0] for problem in problems] == sections


def test_no_code_runs(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    path = write(tmp_path, "evil.yaml", f"a: !!python/object/apply:os.system ['touch {marker}']")
    assert "line 1" in problem_of(path)
    assert not marker.exists()


@pytest.mark.parametrize("text", ["${oc.env:SECRET}", "x${oc.decode:1}", "${a.${b}:SECRET}", "\\${a}", "${a[0]}"])
def test_only_names_of_keys_are_interpolated(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "SECRET", "token")
    resolved, problems = resolve({"a": {"x": 1}, "b": "x", "c": text})
    assert list(problems) == [("c",)]
    assert "takes the name of another key" in problems[("c",)]
    assert "token" not in str(resolved)


def test_interpolation_of_values_sections_neighbours_and_in_text() -> None:
    config = {"a": {"b": 3, "c": "${.b}", "d": "${..e}"}, "e": "v${a.b}", "f": "${a}", "g": "${e}-${e}"}
    resolved, problems = resolve(config)
    assert problems == {}
    assert resolved == {"a": {"b": 3, "c": 3, "d": "v3"}, "e": "v3", "f": {"b": 3, "c": 3, "d": "v3"}, "g": "v3-v3"}


def test_interpolations_in_a_circle_and_to_nowhere() -> None:
    _, problems = resolve({"a": "${b}", "b": "${a}", "policy": {"model_name": "m"}, "c": "${policy.modelname}"})
    assert problems[("c",)] == "c: '${policy.modelname}' names no key; did you mean policy.model_name?"
    assert problems[("a",)].startswith("a: '${b}': Recursive interpolation detected")
    assert problems.keys() == {("a",), ("b",), ("c",)}


def test_question_marks_mean_still_to_be_given(tmp_path: Path, problems_of: Problems) -> None:
    path = write(tmp_path, "m.yaml", "defaults: sft_tiny_moe.yaml\nlogger: {log_dir: '???'}")
    assert problems_of(config=path) == [
        "logger.log_dir: missing; expected a path (~ is the home folder, ${oc.env:NAME} a variable)"
    ]
    assert load_config(path, ["logger.log_dir=x"], check_paths=False).logger.log_dir == "x"


def test_a_folder_is_no_configuration(tmp_path: Path, problems_of: Problems) -> None:
    assert problems_of(config=tmp_path) == [f"{tmp_path}: is a folder, expected a YAML file"]


def test_a_key_with_dots_in_a_file_is_to_be_nested(tmp_path: Path, problems_of: Problems) -> None:
    path = write(tmp_path, "m.yaml", "defaults: sft_tiny_moe.yaml\npolicy.tokenizer.name: x\npolicy.tokeniser: y\n")
    assert problems_of(config=path) == [
        "policy.tokenizer.name: a file has no keys with dots; write policy: {tokenizer: {name: ...}}",
        "policy.tokeniser: unknown key; did you mean policy.tokenizer?",
    ]
