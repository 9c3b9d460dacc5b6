# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The routing study as a user starts it: tiny runs that borrow one engine, two at a time, and what is made of them."""

import subprocess
import sys
from pathlib import Path

import pytest

from examples.routing_study.grid import Condition, Run
from examples.studies.results import read_result
from tests.functional import sft_runs
from tests.support.vllm_engines import vllm_tests

pytestmark = [*vllm_tests(900), pytest.mark.slow]

TINY = (
    "policy.init=random",
    "grpo.max_num_steps=2",
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "grpo.max_val_samples=4",
    "policy.generation.max_new_tokens=12",
)


def study(*words: str, exit_code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command that a user types, in the repository's root."""
    command = [sys.executable, "-m", "examples.routing_study", *words]
    return sft_runs.run_command(command, sft_runs.REPOSITORY_ROOT, exit_code=exit_code)


def test_runs_are_made_once_and_compared(tmp_path: Path) -> None:
    output = ("--output", str(tmp_path))
    command = ("run", *output, "--cells", "none,r3", "--updates", "2", "--dtypes", "bfloat16", "--seeds", "1")
    study(*command, "--model", str(sft_runs.MODEL), *TINY)
    results = {
        method: read_result(tmp_path / "runs" / Run(Condition("small", "bfloat16", 2), method, 0).name)
        for method in ("none", "r3")
    }
    measures = {method: result.measures for method, result in results.items() if result is not None}
    assert measures["none"]["accuracy at start"] == measures["r3"]["accuracy at start"]
    assert measures["r3"]["agreement"] == 1
    assert measures["none"]["agreement"] == measures["none"]["live agreement"] < 1
    assert 0 < measures["r3"]["mismatch, median step"] < measures["none"]["mismatch, median step"]

    again = study(*command, "--model", str(sft_runs.MODEL), *TINY)
    assert again.stdout == "2 runs, 2 of them done; the others take about 0.0 h, as long as those that are done\n"
    more = study(*command, "--seeds", "2", "--jobs", "2", "--model", str(sft_runs.MODEL), *TINY)
    assert "4 runs, 2 of them done" in more.stdout
    others = study(*command, "--seeds", "3", "--model", str(sft_runs.MODEL), *TINY[:-1], exit_code=2)
    assert "its runs have the overrides" in others.stderr
    shown = study("tables", *output)
    assert "have the same held-out accuracy in 2 of 2 pairs" in shown.stdout
