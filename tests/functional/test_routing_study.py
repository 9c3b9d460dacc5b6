# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The routing study as a user starts it: tiny runs that borrow one engine, two at a time, and what is made of them."""

import subprocess
import sys
from pathlib import Path

import pytest

from examples.routing_study.grid import Condition, Run
from examples.studies.results import read_result
from nemo_rl_moe.generation.vllm.releases import installed_release
from tests.functional import sft_runs

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(installed_release() is None, reason="vLLM is not installed: make vllm"),
]

TINY = (
    "policy.init=random",
    "grpo.max_num_steps=2",
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "grpo.max_val_samples=4",
    "policy.generation.max_new_tokens=12",
)


def study(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command that a user types, in the repository's root."""
    return subprocess.run(
        [sys.executable, "-m", "examples.routing_study", *words],
        capture_output=True,
        text=True,
        env=sft_runs.environment(),
        cwd=sft_runs.REPOSITORY_ROOT,
        timeout=600,
        check=False,
    )


def test_runs_are_made_once_and_compared(tmp_path: Path) -> None:
    output = ("--output", str(tmp_path))
    command = ("run", *output, "--cells", "none,r3", "--updates", "2", "--dtypes", "bfloat16", "--seeds", "1")
    first = study(*command, "--model", str(sft_runs.MODEL), *TINY)
    assert first.returncode == 0, first.stdout + first.stderr
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
    assert (again.returncode, again.stdout) == (
        0,
        "2 runs, 2 of them done; the others take about 0.0 h, as long as those that are done\n",
    )
    more = study(*command, "--seeds", "2", "--jobs", "2", "--model", str(sft_runs.MODEL), *TINY)
    assert more.returncode == 0, more.stdout + more.stderr
    assert "4 runs, 2 of them done" in more.stdout
    others = study(*command, "--seeds", "3", "--model", str(sft_runs.MODEL), *TINY[:-1])
    assert others.returncode == 2
    assert "its runs have the overrides" in others.stderr
    shown = study("tables", *output)
    assert shown.returncode == 0, shown.stderr
    assert "have the same held-out accuracy in 2 of 2 pairs" in shown.stdout
