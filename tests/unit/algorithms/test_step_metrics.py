# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
from contextlib import ExitStack
from dataclasses import replace

import pytest

from nemo_rl_moe.algorithms.step_metrics import performance_metrics, training_metrics, validation_metrics
from nemo_rl_moe.metrics import MetricSeries, PhaseClock, Reduction, with_prefix
from nemo_rl_moe.models.interfaces import GpuUse, TrainResult

SERIES = {
    # Two global batches in one call: the sum of the shares is not the loss that is reported.
    "loss": MetricSeries((0.5, 0.25, 1.0, 0.5), Reduction.SUM),
    "num_valid_tokens": MetricSeries((3.0, 4.0, 5.0, 6.0), Reduction.SUM),
    "entropy": MetricSeries((0.5, 0.25, 1.25, 1.0), Reduction.SEQUENCE_SHARE),
    "ratio_min": MetricSeries((0.9, 0.7, 0.8, 1.0), Reduction.MIN),
    "ratio_max": MetricSeries((1.1, 1.3, 1.2, 1.0), Reduction.MAX),
}
RESULT = TrainResult(
    global_loss=1.125,
    grad_norm=2.5,
    lr=3e-4,
    num_microbatches=4,
    num_tokens=96,
    microbatch_metrics=SERIES,
    moe_metrics={
        "load_balancing_loss": 1.0625,
        "load_balancing_loss_layer_0": 1.125,
        "z_loss": 3.0,
        "moe_expert_utilization/layer_0_expert_7": 0.5,
    },
)


def test_training_metrics() -> None:
    before = (dict(RESULT.moe_metrics), dict(RESULT.microbatch_metrics))
    metrics = training_metrics(RESULT)
    without_moe = {
        "train/loss": 1.125,
        "train/grad_norm": 2.5,
        "train/lr": 3e-4,
        "train/num_microbatches": 4.0,
        "train/num_tokens": 96.0,
        "train/skipped_updates": 0.0,
        "train/num_valid_tokens": 18.0,
        "train/entropy": 3.0,
        "train/ratio_min": 0.7,
        "train/ratio_max": 1.3,
    }
    assert metrics == without_moe | {
        "train/moe/load_balancing_loss": 1.0625,
        "train/moe/load_balancing_loss_layer_0": 1.125,
        "train/moe/z_loss": 3.0,
        "train/moe_expert_utilization/layer_0_expert_7": 0.5,
    }
    assert {type(value) for value in metrics.values()} == {float}
    assert training_metrics(replace(RESULT, moe_metrics={})) == without_moe
    assert (RESULT.moe_metrics, RESULT.microbatch_metrics) == before


def test_validation_metrics_keep_the_loss() -> None:
    series = {"loss": MetricSeries((0.5, 0.75), Reduction.SUM), "accuracy": MetricSeries((0.25, 0.5), Reduction.SUM)}
    assert validation_metrics(series) == {"val/loss": 1.25, "val/accuracy": 0.75}


USE = GpuUse(
    num_gpus=2,
    num_gpus_of_run=3,
    train_flops=6 * 10**12,
    peak_flops_per_second=4e12,
    memory={"max_memory_allocated_gb": MetricSeries((61.0, 64.5), Reduction.MAX)},
)


def clock_of(phases: list[tuple[str, float]]) -> PhaseClock:
    """A clock of phases one inside the other, from the outermost; the seconds are of each one's own."""
    now = [0.0]
    clock = PhaseClock(lambda: now[0])
    with ExitStack() as opened:
        for name, seconds in phases:
            opened.enter_context(clock.phase(name))
            now[0] += seconds
    return clock


def test_performance_metrics() -> None:
    """96 tokens in a step of 8 s, 4 of them training."""
    found = performance_metrics(replace(RESULT, gpu_use=USE), clock_of([("step", 4.0), ("train", 4.0)]))
    assert found == {
        "performance/tokens_per_sec_per_gpu": 4.0,
        "performance/policy_training_tokens_per_sec_per_gpu": 12.0,
        "performance/train_tflops_per_gpu": 0.75,
        "performance/train_fp_utilization": 0.375,
        "performance/max_memory_allocated_gb": 64.5,
    }


def test_utilization_of_an_unknown_card_is_left_out() -> None:
    clock = clock_of([("step", 4.0), ("train", 4.0)])
    known = performance_metrics(replace(RESULT, gpu_use=USE), clock)
    found = performance_metrics(replace(RESULT, gpu_use=replace(USE, peak_flops_per_second=None)), clock)
    assert found == {key: value for key, value in known.items() if key != "performance/train_fp_utilization"}


def test_a_cpu_has_no_performance_metrics() -> None:
    assert performance_metrics(RESULT, clock_of([("step", 4.0), ("train", 4.0)])) == {}


def test_what_a_loop_does_not_time_has_no_speed() -> None:
    found = performance_metrics(replace(RESULT, gpu_use=USE), PhaseClock())
    assert found == {"performance/max_memory_allocated_gb": 64.5}


@pytest.mark.parametrize(("metrics", "expected"), [({}, {}), ({"a": 1.0, "b/c": 2.0}, {"x/a": 1.0, "x/b/c": 2.0})])
def test_with_prefix(metrics: dict[str, float], expected: dict[str, float]) -> None:
    assert with_prefix("x", metrics) == expected
