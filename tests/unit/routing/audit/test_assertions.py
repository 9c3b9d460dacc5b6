# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The assertion on routes, its plug-in of pytest, and the step of the action."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.routing.audit.assertions import assert_routes_agree
from tests.conftest import REPOSITORY_ROOT

EXPERTS, LAYERS, TOPK = 16, 3, 2
EXAMPLES = REPOSITORY_ROOT / "examples" / "audit"


def routes(tokens: int = 60, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.random((tokens, LAYERS, EXPERTS)).argsort(-1)[..., :TOPK].astype(np.int32)


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor, np.ndarray.tolist])
def test_the_same_sets_of_experts_agree(kind: Callable[[np.ndarray], object]) -> None:
    expected = routes()
    assert_routes_agree(kind(expected[..., ::-1].copy()), kind(expected), num_experts=EXPERTS, least_agreement=1)
    one_layer = expected[:, 1].copy()
    assert_routes_agree(kind(one_layer), kind(one_layer), num_experts=EXPERTS, least_agreement=1)


def test_unknown_rows_are_left_out() -> None:
    captured, expected = routes(), routes()
    captured[:5] = -1
    with pytest.raises(AssertionError, match="no row is known on both sides"):
        assert_routes_agree(np.full_like(captured, -1), expected, num_experts=EXPERTS)
    assert_routes_agree([captured, expected], [expected, expected], num_experts=EXPERTS)


def _wrong_set(rows: np.ndarray) -> None:
    rows[7, 2] = [0, 1] if set(rows[7, 2]) != {0, 1} else [2, 3]


def _other_layer(rows: np.ndarray) -> None:
    rows[:, 2] = rows[:, 1]


def _permuted(rows: np.ndarray) -> None:
    rows[:, 0] = (rows[:, 0] + 1) % EXPERTS


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (_wrong_set, "the first is token 7 of sequence 0 in layer 9: got "),
        (_other_layer, "layer 9 carries layer 5's routes"),
        (_permuted, "layer 1: captured expert ids are a permutation of the router's"),
    ],
)
def test_a_fault_in_range_is_named(fault: Callable[[np.ndarray], None], text: str) -> None:
    captured, expected = routes(400), routes(400)
    fault(captured)
    with pytest.raises(AssertionError) as caught:
        assert_routes_agree(captured, expected, num_experts=EXPERTS, least_agreement=1, layers=(1, 5, 9))
    assert text in str(caught.value)


def test_what_is_no_route_is_refused() -> None:
    with pytest.raises(DataError, match="expected integers"):
        assert_routes_agree(np.zeros((4, 2, 2)), np.zeros((4, 2, 2)), num_experts=4)
    with pytest.raises(AssertionError, match=r"captured is \[60, 3, 2\], expected \[59, 3, 2\]"):
        assert_routes_agree(routes(), routes()[1:], num_experts=EXPERTS)


TEST_FILE = """
import numpy as np

def test_right(assert_routes_agree):
    rows = np.random.default_rng(0).random((50, 2, 8)).argsort(-1)[..., :2]
    assert_routes_agree(rows, rows, num_experts=8)

def test_wrong(assert_routes_agree):
    rows = np.random.default_rng(0).random((50, 2, 8)).argsort(-1)[..., :2]
    assert_routes_agree(rows[:, ::-1], rows, num_experts=8)

def test_files(audit_routes):
    audit_routes("{healthy}")

def test_wrong_files(audit_routes):
    audit_routes("{wrong}")
"""


def test_fixtures_come_with_the_plug_in(tmp_path: Path) -> None:
    healthy, wrong = (EXAMPLES / "faults" / name for name in ("healthy", "shifted_token"))
    (tmp_path / "test_of_a_user.py").write_text(TEST_FILE.format(healthy=healthy, wrong=wrong), encoding="utf-8")
    words = [
        "-p",
        "nemo_rl_moe.routing.audit.pytest_plugin",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        "-q",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        # An installed package loads the plug-in by its entry point, too: a second registration is an error of pytest.
        env={
            **os.environ,
            "PYTEST_ADDOPTS": "",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": str(REPOSITORY_ROOT),
        },
    )
    assert "2 failed, 2 passed" in done.stdout, done.stdout
    assert "layer 0 carries layer 1's routes" in done.stdout
    assert "routes are one token late" in done.stdout


@pytest.mark.parametrize(
    ("fault", "fails", "code"),
    # Each is an interpreter with torch: the quick list has the one whose findings fail the step.
    [
        pytest.param("healthy", "true", 0, marks=pytest.mark.full),
        ("shifted_token", "true", 1),
        pytest.param("shifted_token", "false", 0, marks=pytest.mark.full),
    ],
)
def test_the_step_of_the_action(fault: str, fails: str, code: int, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    environment = {**os.environ, **{name: str(path) for name, path in files.items()}, "RUNNER_TEMP": str(tmp_path)}
    environment |= {"AUDIT_PATH": str(EXAMPLES / "faults" / fault), "AUDIT_OPTIONS": "--steps 3:4", "AUDIT_FAIL": fails}
    script = REPOSITORY_ROOT / ".github" / "actions" / "audit" / "run.py"
    done = subprocess.run(
        [sys.executable, script], env={**environment, "PYTHONPATH": str(REPOSITORY_ROOT)}, check=False
    )
    assert done.returncode == code
    number = int(fault != "healthy")
    assert f"findings={number}\n" in files["GITHUB_OUTPUT"].read_text(encoding="utf-8")
    assert ("one token late" in files["GITHUB_STEP_SUMMARY"].read_text(encoding="utf-8")) == bool(number)
    (run,) = json.loads((tmp_path / "routing-audit.json").read_text(encoding="utf-8"))
    assert (run["format"], run["version"], len(run["problems"])) == ("routing-audit", 1, number)
