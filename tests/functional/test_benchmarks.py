# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run, and print one JSON line that says what it must."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SPEEDS = {"tokens_per_second", "seconds_per_step", "tokens_per_cpu_second"}


def run_benchmark(repository_root: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs it as a user does, from the repository's root."""
    command = [sys.executable, f"benchmarks/{name}.py", *arguments]
    return subprocess.run(command, cwd=repository_root, capture_output=True, text=True, check=False)


def result_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The one line that a benchmark prints."""
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    result: dict[str, Any] = json.loads(line)
    return result


def test_sft_throughput_prints_one_line_of_measured_speeds(repository_root: Path) -> None:
    result = result_of(
        run_benchmark(repository_root, "sft_throughput", "--steps", "3", "--warmup", "1", "--block", "2")
    )
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
    done = run_benchmark(repository_root, "sft_throughput", "--workers", "4", "--micro-batch-size", "4")
    assert done.returncode == 2
    assert "nearest: --micro-batch-size 2" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("reference", ["in_step", "precompute"])
def test_dpo_throughput_prints_one_line_of_measured_speeds(repository_root: Path, reference: str) -> None:
    sizes = ("--steps", "3", "--warmup", "1", "--reference-logprobs", reference)
    result = result_of(run_benchmark(repository_root, "dpo_throughput", *sizes))
    assert result.keys() >= SPEEDS
    speed, seconds = result["tokens_per_second"], result["seconds_per_step"]
    assert 0 < speed["median"] <= speed["best"]
    assert result["tokens_per_step"] == 16 * 128
    assert speed["median"] * seconds["median"] == pytest.approx(16 * 128, rel=1e-3)
    assert (0 < result["reference_share"] < 0.6) if reference == "in_step" else result["reference_share"] == 0
    assert 0.3 < result["last_loss"] < 1.5  # it begins at log(2)
    assert (result["reference_logprobs"], result["workers"]) == (reference, 1)


def test_dpo_throughput_says_which_sizes_fit(repository_root: Path) -> None:
    done = run_benchmark(repository_root, "dpo_throughput", "--workers", "4", "--micro-batch-size", "4")
    assert done.returncode == 2
    assert "nearest: --micro-batch-size 2" in done.stderr


def test_grpo_throughput_says_where_a_step_goes(repository_root: Path) -> None:
    result = result_of(run_benchmark(repository_root, "grpo_throughput", "--steps", "2", "--warmup", "1"))
    assert result.keys() >= {"seconds_per_step", "generation_tokens_per_second", "phase_shares", "model", "versions"}
    assert (result["name"], result["steps"], result["workers"]) == ("grpo_throughput", 2, 1)
    assert 0 < result["seconds_per_step"]["best"] <= result["seconds_per_step"]["median"]
    # 32 responses of at most 64 tokens; of random weights few end early.
    assert 32 * 32 < result["generated_tokens_per_step"] <= 32 * 64
    assert result["generation_tokens_per_second"] > 0
    shares = result["phase_shares"]
    assert shares.keys() == {"generation", "rewards", "train", "other"}
    assert sum(shares.values()) == pytest.approx(1.0, abs=1e-3)  # of four rounded numbers
    assert all(share > 0 for share in shares.values()), "no phase counts twice"


def test_generation_throughput_compares_the_same_tokens(repository_root: Path) -> None:
    sizes = ("--rounds", "1", "--prompts", "4", "--prompt-tokens", "8", "--new-tokens", "8")
    result = result_of(run_benchmark(repository_root, "generation_throughput", *sizes))
    assert result["name"] == "generation_throughput"
    contestants = {f"{who}_{how}" for who in ("engine", "plain") for how in ("sampled", "greedy")}
    assert result["tokens_per_second"].keys() == contestants
    assert all(0 < speed["median"] <= speed["best"] for speed in result["tokens_per_second"].values())
    assert result["to_plain"].keys() == {"sampled", "greedy"}
    assert (result["to_transformers"], result["to_vllm"]) == (None, None)
    assert result["same_greedy_tokens_as_plain"] == {"engine_greedy": 1.0, "plain_greedy": 1.0}
    assert [result[key] for key in ("prompts", "prompt_tokens", "new_tokens", "rounds")] == [4, 8, 8, 1]


def test_checkpoint_saving_prints_one_line_of_measured_times(repository_root: Path) -> None:
    result = result_of(run_benchmark(repository_root, "checkpoint_saving", "--rounds", "2"))
    blocking, writing = result["blocking_seconds"], result["write_seconds"]
    # Training waits for the snapshot alone: less than for all of the writing, however busy the machine is.
    assert 0 < blocking["median"] <= blocking["max"] < writing["median"] <= writing["max"]
    # Weights and two moments of 1.9 million parameters in float32, and the index.
    assert 22.8 < result["checkpoint_megabytes"] < 25
    assert result["step_ratio"] > 0


def test_report_prints_one_line_of_time_memory_and_size(repository_root: Path, tmp_path: Path) -> None:
    sizes = ("--steps", "60", "--layers", "4", "--experts", "16", "--runs", "2")
    kept = tmp_path / "report.html"
    result = result_of(run_benchmark(repository_root, "report", *sizes, "--output", str(kept)))
    assert [result[key] for key in ("benchmark", "steps", "layers", "experts", "runs")] == ["report", 60, 4, 16, 2]
    assert result["cpu_seconds"] > 0
    assert 0 < result["seconds"] < 60
    assert 50 < result["peak_megabytes"] < 400
    assert result["file_megabytes"] == round(kept.stat().st_size / 1e6, 2)
    assert 1.9 < result["file_megabytes"] < 5


def test_refit_cost_grows_with_the_bytes(repository_root: Path) -> None:
    result = result_of(run_benchmark(repository_root, "refit_cost", "--sizes", "1", "10", "--rounds", "2"))
    small, large = result["sizes"]
    assert [row["bytes"] for row in (small, large)] == [4 * row["num_parameters"] for row in (small, large)]
    assert small["seconds"].keys() == result["line"].keys() == {"transport"}
    assert 0 < small["seconds"]["transport"]["best"] < large["seconds"]["transport"]["best"]
