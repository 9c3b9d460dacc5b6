# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run, and print one JSON line that says what it must."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SPEEDS = {"tokens_per_second", "seconds_per_step", "tokens_per_cpu_second"}


def run_benchmark(repository_root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs it as a user does, from the repository's root."""
    command = [sys.executable, "benchmarks/sft_throughput.py", *arguments]
    return subprocess.run(command, cwd=repository_root, capture_output=True, text=True, check=False)


def test_sft_throughput_prints_one_line_of_measured_speeds(repository_root: Path) -> None:
    done = run_benchmark(repository_root, "--steps", "3", "--warmup", "1", "--block", "2")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    result: dict[str, Any] = json.loads(line)
    for policy in (result["moe_metrics_off"], result["moe_metrics_on"]):
        assert policy.keys() == SPEEDS
        speed, seconds = policy["tokens_per_second"], policy["seconds_per_step"]
        assert 0 < speed["median"] <= speed["best"]
        assert speed["median"] * seconds["median"] == pytest.approx(8 * 128, rel=1e-3)
        assert policy["tokens_per_cpu_second"] > 0
    assert result["on_to_off"] > 0
    # Tracking reads what the router computes anyway: not a bit of the training may differ.
    assert result["losses_identical"]
    assert 5.0 < result["last_loss"] < 7.0  # random weights and tokens: about log(512)
    assert result["workers"] == result["threads_per_worker"] == 1
    assert result["model"]["num_parameters"] == 1_906_048


def test_sft_throughput_says_which_sizes_fit(repository_root: Path) -> None:
    done = run_benchmark(repository_root, "--workers", "4", "--micro-batch-size", "4")
    assert done.returncode == 2
    assert "nearest: --micro-batch-size 2" in done.stderr
    assert done.stdout == ""
