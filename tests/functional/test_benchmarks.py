# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run, and print one JSON line that says what it must."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from nemo_rl_moe.generation.vllm.releases import installed_release
from tests.functional import sft_runs
from tests.functional.shared_ray import ended_with

pytestmark = pytest.mark.slow

SPEEDS = {"tokens_per_second", "seconds_per_step", "tokens_per_cpu_second"}


def run_benchmark(
    repository_root: Path, name: str, *arguments: str, exit_code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Runs it as a user does, from the repository's root."""
    command = [sys.executable, f"benchmarks/{name}.py", *arguments]
    done = subprocess.run(command, cwd=repository_root, capture_output=True, text=True, check=False)
    return ended_with(exit_code, done)


def result_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The one line that a benchmark prints."""
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


def test_host_costs_prints_one_line_of_seconds(repository_root: Path) -> None:
    result = result_of(run_benchmark(repository_root, "host_costs", "--repetitions", "1"))
    assert len(result["cpu_seconds"]) == 7
    assert all(seconds >= 0 for seconds in result["cpu_seconds"].values())


@pytest.mark.parametrize("name", ["sft_throughput", "dpo_throughput"])
def test_it_says_which_sizes_fit(name: str, repository_root: Path) -> None:
    done = run_benchmark(repository_root, name, "--workers", "4", "--micro-batch-size", "4", exit_code=2)
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
    assert (0 < result["reference_share"] < 1) if reference == "in_step" else result["reference_share"] == 0
    assert 0.3 < result["last_loss"] < 1.5  # it begins at log(2)
    assert (result["reference_logprobs"], result["workers"]) == (reference, 1)


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


def test_checkpoint_saving_prints_one_line_of_measured_times(repository_root: Path) -> None:
    result = result_of(run_benchmark(repository_root, "checkpoint_saving", "--rounds", "2"))
    blocking, writing = result["blocking_seconds"], result["write_seconds"]
    # Training waits for the snapshot alone: less than for all of the writing, however busy the machine is.
    assert 0 < blocking["median"] <= blocking["max"]
    assert 0 < writing["median"] <= writing["max"]
    # Weights and two moments of 1.9 million parameters in float32, and the index.
    assert 22.8 < result["checkpoint_megabytes"] < 25
    assert result["step_ratio"] > 0


def test_checksums_are_compared_from_the_disk_and_from_memory(repository_root: Path) -> None:
    result = result_of(run_benchmark(repository_root, "checksums", "--rounds", "1", "--hidden-size", "64"))
    for form in (result["training_checkpoint"], result["exported_model"]):
        assert form.keys() == {"megabytes", "save", "load_cold", "load_warm"}
        assert form["load_cold"]["cached"] == 0, "everything came from the disk"
        assert form["load_warm"]["cached"] == 1, "nothing did"
        assert all(form[kind]["ratio"] > 0 and form[kind]["seconds"] > 0 for kind in ("save", "load_cold", "load_warm"))


def test_an_audit_s_seconds_and_memory_are_measured(repository_root: Path) -> None:
    sizes = ("--tokens", "70000", "--layers", "4", "--experts", "16", "--topk", "2")
    result = result_of(run_benchmark(repository_root, "audit_scale", *sizes))
    assert (result["tokens"], result["steps"]) == (70_000, 2)
    # 30 bytes of other columns; margins, 4 bytes a layer; two columns of experts, of which 4 bits each say something.
    assert 70_000 * 20 < result["captured_bytes"] < 70_000 * (30 + 4 * 4 + 2 * 4 * 2 * 2)
    assert result["cpu_seconds"] > 0
    assert 10_000_000 < result["peak_bytes"] < 2_000_000_000


def test_metrics_of_a_thousand_ranks_send_what_those_of_eight_do(repository_root: Path) -> None:
    result = result_of(run_benchmark(repository_root, "metrics_at_scale", "--repeats", "2"))
    slice_alone, many_slices, more_microbatches, *_ = result["jobs"]
    assert [job["ranks"] for job in (slice_alone, many_slices)] == [8, 1024]
    over_all = 8 * 48 * (128 + 2) + 8 * (48 + 1)  # load matrix, factors and their number; maxima and the peak
    assert many_slices["bytes_over_all_ranks"] == more_microbatches["bytes_over_all_ranks"] == over_all
    # There the slice is the whole job.
    assert slice_alone["bytes_over_all_ranks"] == sum(many_slices[key] for key in many_slices if "bytes" in key)
    assert all(job["milliseconds"] > 0 and job["bytes_over_all_ranks"] < 2e5 for job in result["jobs"])


def test_the_driver_s_work_does_not_grow_with_the_ranks(repository_root: Path) -> None:
    few, *_, many = result_of(run_benchmark(repository_root, "driver_at_scale"))["ranks"]
    assert (few["ranks"], many["ranks"]) == (16, 1024)
    # Of each rank comes a result, without what is the same on all.
    assert 0 < many["received_mb"] - few["received_mb"] < 1024 * 500 / 1e6
    assert many["sent_mb"] == pytest.approx(few["sent_mb"], rel=0.01)
    assert many["peak_mb_of_python"] < 1.1 * few["peak_mb_of_python"]


def test_step_profile_divides_a_step_by_kinds_of_operations(repository_root: Path) -> None:
    result = result_of(run_benchmark(repository_root, "step_profile", "--steps", "2"))
    assert result["trainer_cpu_ms"] > 0
    assert sum(result["shares"].values()) == pytest.approx(1, abs=0.005)
    assert result["shares"]["matrix_products"] > 0.2


@pytest.mark.trl
def test_trl_race_names_both_sides_and_their_ratio(repository_root: Path) -> None:
    sizes = ("--work", "sft,grpo", "--pairs", "2", "--steps", "2")
    result = result_of(run_benchmark(repository_root, "trl_race", *sizes))
    assert {"trl", "transformers", "torch", "nemo_rl_moe"} <= result["versions"].keys()
    for work in ("sft", "grpo"):
        for clocks in result["work"][work]["ours_to_trl"].values():
            assert all(0 < ratio["least"] <= ratio["median"] <= ratio["most"] for ratio in clocks.values())


def test_refit_cost_grows_with_the_bytes(repository_root: Path) -> None:
    result = result_of(run_benchmark(repository_root, "refit_cost", "--sizes", "1", "10", "--rounds", "2"))
    small, large = result["sizes"]
    assert [row["bytes"] for row in (small, large)] == [4 * row["num_parameters"] for row in (small, large)]
    assert small["seconds"].keys() == result["line"].keys() == {"transport"}
    assert all(size["seconds"]["transport"]["best"] > 0 for size in (small, large))


def test_routing_cost_adds_up_its_parts(repository_root: Path) -> None:
    arguments = ("--starts", "1", "--rounds", "3", "--warmup", "1", "--steps", "3")
    result = result_of(run_benchmark(repository_root, "routing_cost", *arguments))
    parts = {"load", "capture", "replay", "all", "measurements"}
    assert result["parts"].keys() == parts
    assert 0 < result["total"]["low"] <= result["total"]["median"] <= result["total"]["high"]
    # The same steps without a capture, with one, and with one that is only looked at, train to the same bit.
    assert result["losses_identical"]
    # Two bytes for each of two experts in four layers of every token but the last one of each of 128 sequences.
    assert result["captured_bytes"] == (result["num_tokens"] - 128) * 4 * 2 * 2
    assert result["cpu_seconds_of_measurements"] > 0
    step = result["of_a_step"]
    assert step["cpu_seconds"] > 0
    assert 0 < step["cpu_seconds_of_worker"] / step["cpu_seconds"] < 1
    total = (result["total"]["median"] - 1) * step["cpu_seconds_of_worker"] / step["cpu_seconds"]
    assert step["cost"].keys() == parts | {"total"}
    assert step["cost"]["total"] == pytest.approx(total, abs=1e-3)


def test_routing_faults_are_found_and_healthy_steps_are_not(repository_root: Path, tmp_path: Path) -> None:
    """Two of the scorecard's faults: one that ends a run, and one that it warns of."""
    model = make_weights(tmp_path / "model")
    words = ("--faults", "zeros", "frozen_bias", "--onsets", "2", "--healthy", "30", "--model", str(model))
    done = run_benchmark(repository_root, "routing_faults", *words, "--output", str(tmp_path / "scores.json"))
    found = json.loads((tmp_path / "scores.json").read_text())
    zeros, frozen = found["scores"]
    assert (zeros["fault"], zeros["steps"], zeros["healthy_steps"]) == ("zeros", 1, 1)
    assert "rows hold expert 0 alone, in all layers" in zeros["reported"]
    assert (frozen["fault"], frozen["steps"]) == ("frozen_bias", 2)
    assert frozen["reported"].startswith("the expert bias of 4 layers has not moved since step 2")
    assert zeros["false_alarms"] == frozen["false_alarms"] == []
    real, simulated = found["healthy"][:2]
    assert (real["num_steps"], simulated["num_steps"]) == (12, 10)
    # Random weights earn nothing, which is true and no matter of their routes.
    said = [line for row in found["healthy"] for line in row["alarms"]]
    assert [line for line in said if not line.startswith("every advantage has been 0 since step 1")] == []
    assert "| routes that nobody wrote | vllm#54730 | step 2 | 1 step |" in done.stdout


def test_faults_show_on_the_captures_of_runs(repository_root: Path, tmp_path: Path) -> None:
    """One that is planted into a healthy run's capture, one of a run that computes otherwise, and healthy captures."""
    model, output = make_weights(tmp_path / "model"), tmp_path / "scores.json"
    words = ("--files", "--faults", "zeros", "router_bf16", "--onsets", "2", "--captures", "1", "--model", str(model))
    run_benchmark(repository_root, "routing_faults", *words, "--output", str(output))
    found = json.loads(output.read_text())
    zeros, router = found["scores"]
    assert (zeros["fault"], zeros["steps"], router["fault"], router["steps"]) == ("zeros", 1, "router_bf16", 2)
    assert "rows hold expert 0 alone, in all layers" in zeros["reported"]
    assert router["reported"].startswith("rollout and training choose other experts in ")
    assert zeros["false_alarms"] == router["false_alarms"] == []
    assert [(row["num_steps"], row["alarms"]) for row in found["healthy"]] == [(12, [])] * 3


def make_weights(folder: Path) -> Path:
    """The tiny model with random weights that are large enough for its tokens to be routed apart."""
    torch.manual_seed(3)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sft_runs.MODEL), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(sft_runs.MODEL).save_pretrained(folder)
    return folder


@pytest.mark.vllm
@pytest.mark.skipif(installed_release() is None, reason="vLLM is not installed: make vllm")
def test_refit_check_measures_steps_with_it_and_without(repository_root: Path) -> None:
    result = result_of(run_benchmark(repository_root, "refit_check", "--pairs", "2", "--warmup", "1"))
    assert (result["name"], result["pairs"]) == ("refit_check", 2)
    assert (result["num_sequences"], result["num_tokens"]) == (4, 32)
    seconds = result["check_seconds"]["median"]
    assert seconds > 0
    assert result["check_share"]["median"] == pytest.approx(seconds / result["step_seconds"]["on"], rel=0.5)
    added = result["refit_seconds"]["on"] - result["refit_seconds"]["off"]
    assert result["cost_seconds"]["mean"] == pytest.approx(result["check_seconds"]["mean"] + added, abs=1e-3)
    cpu = result["cpu_seconds"]
    assert 0 < cpu["refit"] < cpu["step"]
    assert result["cpu_cost"]["mean"] == pytest.approx(cpu["check"]["mean"] / cpu["step"], abs=1e-4)


def test_mixed_lengths_prints_one_line_of_padding_and_speeds(repository_root: Path) -> None:
    result = result_of(run_benchmark(repository_root, "mixed_lengths", "--turns", "1", "--block", "2", "--warmup", "0"))
    modes = result["modes"]
    padding = {mode: found["computed_to_real"] for mode, found in modes.items()}
    assert padding["packing"] == 1.0 < padding["dynamic"] < padding["dynamic_fewest_microbatches"] < padding["plain"]
    fewest = modes["dynamic_fewest_microbatches"]["microbatches_per_step"]
    assert modes["packing"]["microbatches_per_step"] <= fewest < modes["dynamic"]["microbatches_per_step"]
    assert all(found["to_plain"] > 0 and found["tokens_per_cpu_second"] > 0 for found in modes.values())
    # The same batches: but for auxiliary losses, which are those of a microbatch, the modes train the same.
    losses = result["last_losses"]
    assert list(losses.values()) == pytest.approx([losses["plain"]] * 4, rel=1e-3)


def test_adapter_mismatch_shows_what_merging_loses(repository_root: Path) -> None:
    arguments = ("--engines", "megatron_separate", "--norms", "1e-3", "1e-2", "--samples", "1")
    lines = run_benchmark(repository_root, "adapter_mismatch", *arguments).stdout.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [row[1:3] for row in rows] == [
        [kind, norm] for kind in ("float32", "bfloat16") for norm in ("0.001", "0.01")
    ]
    merged, adapter = ([float(row[column].split()[0]) for row in rows] for column in (4, 5))
    lost = [float(row[3]) for row in rows]
    assert lost[:2] == [0.0, 0.0]
    assert 1 > lost[2] > 3 * lost[3] > 0
    assert max(merged[:2] + adapter[:2]) < 1e-4
    assert all(with_adapter < gap / 2 for gap, with_adapter in zip(merged[2:], adapter[2:], strict=True))
