# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Findings reported while a run goes on: each episode once, after a resume too, and a healthy run has none."""

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from nemo_rl_moe.config.files import find_config, read_with_defaults
from nemo_rl_moe.config.schema_run import AlertsConfig
from nemo_rl_moe.routing.agreement.route_identity import RoutingAnomaly
from nemo_rl_moe.routing.agreement.statistics import RoutingReport
from nemo_rl_moe.routing.findings.tracker import Finding
from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad
from nemo_rl_moe.runs.folder.artifacts import EXPERT_LOAD, ROUTING
from nemo_rl_moe.runs.folder.expert_load import ExpertLoadWriter
from nemo_rl_moe.runs.folder.routing import RoutingWriter
from nemo_rl_moe.runs.loggers.alerts import Alert, AlertWatch, alerts_of
from nemo_rl_moe.runs.loggers.console import ConsoleLogger
from nemo_rl_moe.runs.loggers.factory import LoggerResume, build_loggers
from nemo_rl_moe.runs.loggers.rewind import rewind_run_folder
from nemo_rl_moe.runs.loggers.wandb_files import wandb_files, wandb_records
from tests.support.loggers import load_of, settings_for
from tests.support.made_runs import routing_report, routing_report_metrics

TOPK = 2
HEALTHY = load_of([100, 100, 101, 99], [101, 98, 100, 101])
# Dead for so many steps; its cv is 0.67, below the threshold of 1.
SICK = load_of([100, 100, 101, 99], [133, 133, 134, 0])
REPORTED = "warning: step {}: layer 2: 1 of 4 experts dead since step {}; beyond sampling noise"


def shipped_alerts(name: str = "sft.yaml") -> AlertsConfig:
    return AlertsConfig.model_validate(read_with_defaults(find_config(name))["logger"]["alerts"])


def log_run(
    run_folder: Path, loads: Mapping[int, ExpertLoad], *enabled: str, resumed_after: int | None = None
) -> list[str]:
    """Logs steps as a run does; returns the warnings on the console."""
    resume = None
    if resumed_after is not None:
        rewind_run_folder(run_folder, resumed_after)
        resume = LoggerResume(resumed_after, {})
    stream = io.StringIO()
    settings = settings_for(run_folder.parent, *enabled, alerts=True)
    with build_loggers(settings, run_folder, ConsoleLogger(99, stream=stream), resume, topk=TOPK) as loggers:
        writer = ExpertLoadWriter(run_folder, pytest.fail)
        for step, load in loads.items():
            writer.write(step, load)
            loggers.log_artifact(step, EXPERT_LOAD.name, load)
            loggers.log_step(step, {"train/loss": 1.0, "train/moe/avg_overload_factor": 1.1})
    return [line for line in stream.getvalue().splitlines() if line.startswith("warning")]


def test_each_episode_is_reported_once_on_the_console_and_by_wandb(tmp_path: Path) -> None:
    sick = {*range(5, 11), *range(15, 20), *range(121, 130)}
    loads = {step: SICK if step in sick else HEALTHY for step in range(1, 130)}
    assert log_run(tmp_path, loads, "wandb") == [REPORTED.format(7, 5), REPORTED.format(123, 121)]
    (file,) = wandb_files(tmp_path / "wandb")
    first, second = wandb_records(file, "alert")
    assert (first.title, first.level) == ("dead experts at step 7", "WARN")
    assert first.text == "layer 2: 1 of 4 experts dead since step 5; beyond sampling noise"
    assert second.title == "dead experts at step 123"


def test_a_healthy_run_is_silent(tmp_path: Path) -> None:
    assert log_run(tmp_path, dict.fromkeys(range(1, 30), HEALTHY), "wandb") == []
    (file,) = wandb_files(tmp_path / "wandb")
    assert list(wandb_records(file, "alert")) == []


@pytest.mark.parametrize(
    ("begins", "resumed_after", "reported_again"),
    [
        (2, 10, []),  # reported before the checkpoint
        # begun before it, reported after it: what was reported since then was cut off
        (9, 10, [REPORTED.format(11, 9)]),
        (12, 10, [REPORTED.format(14, 12)]),
    ],
)
def test_what_went_on_at_the_checkpoint_is_not_reported_again(
    begins: int, resumed_after: int, reported_again: list[str], tmp_path: Path
) -> None:
    loads = {step: SICK if step >= begins else HEALTHY for step in range(1, 21)}
    assert log_run(tmp_path, loads) == [REPORTED.format(begins + 2, begins)]
    rest = {step: load for step, load in loads.items() if step > resumed_after}
    assert log_run(tmp_path, rest, resumed_after=resumed_after) == reported_again


def test_an_episode_that_comes_back_after_the_checkpoint_is_not_reported_again(tmp_path: Path) -> None:
    quiet_from = 130
    loads = {step: SICK if quiet_from - 9 <= step < quiet_from else HEALTHY for step in range(1, quiet_from + 60)}
    assert log_run(tmp_path, loads) == [REPORTED.format(quiet_from - 7, quiet_from - 9)]
    last = max(loads)
    assert log_run(tmp_path, dict.fromkeys(range(last + 1, last + 9), SICK), resumed_after=last) == []


def test_an_expert_of_few_tokens_that_was_dead_at_the_checkpoint_is_not_reported_again(tmp_path: Path) -> None:
    """It has been dead for longer than the thresholds ask, as chance was to be ruled out."""
    few = load_of([1, 1, 1, 1], [1, 2, 1, 0])
    assert log_run(tmp_path, dict.fromkeys(range(1, 41), few)) == [REPORTED.format(23, 1)]
    assert log_run(tmp_path, dict.fromkeys(range(41, 81), few), resumed_after=40) == []


def test_what_cannot_be_replayed_stops_nothing(tmp_path: Path) -> None:
    log_run(tmp_path, dict.fromkeys(range(1, 8), SICK))
    for path in (tmp_path / "expert_load.parquet").iterdir():
        path.write_bytes(b"damaged")
    watch = AlertWatch(settings_for(tmp_path).alerts, TOPK)
    watch.replay(tmp_path, 7)
    watch.replay(tmp_path / "nowhere", 7)


def test_steps_long_past_are_not_read_again(tmp_path: Path) -> None:
    log_run(tmp_path, {step: SICK if step >= 240 else HEALTHY for step in range(1, 251)})
    (first, *_) = sorted((tmp_path / "expert_load.parquet").iterdir())
    first.write_bytes(b"damaged")
    assert log_run(tmp_path, dict.fromkeys(range(251, 256), SICK), resumed_after=250) == []


LATE = RoutingAnomaly("token", "routes are one token late")
LATE_REPORTED = "warning: step {}: routes are one token late; since step {}"


def log_captures(
    run_folder: Path, captures: Mapping[int, RoutingReport], *enabled: str, resumed_after: int | None = None
) -> str:
    """Logs steps as a GRPO run does, of the last one the capture alone; returns what the console shows."""
    resume = None
    if resumed_after is not None:
        rewind_run_folder(run_folder, resumed_after)
        resume = LoggerResume(resumed_after, {})
    stream = io.StringIO()
    settings = settings_for(run_folder.parent, *enabled, alerts=True)
    with build_loggers(settings, run_folder, ConsoleLogger(99, stream=stream), resume) as loggers:
        writer = RoutingWriter(run_folder, pytest.fail)
        for step, report in captures.items():
            writer.write(step, report)
            loggers.log_artifact(step, ROUTING.name, report)
            if step < max(captures):
                loggers.log_step(step, {"train/loss": 1.0, **routing_report_metrics(report)})
        writer.close()
    return "\n".join(line for line in stream.getvalue().splitlines() if line.startswith("warning"))


def test_wrong_routes_are_reported_before_the_step_ends(tmp_path: Path) -> None:
    """A run that replays them ends by them: their step has no metrics."""
    wrong = routing_report([0], anomalies=[LATE])
    assert log_captures(tmp_path, {1: routing_report([0]), 2: wrong}, "wandb") == LATE_REPORTED.format(2, 2)
    (file,) = wandb_files(tmp_path / "wandb")
    (alert,) = wandb_records(file, "alert")
    assert (alert.title, alert.level) == ("routes of another token at step 2", "WARN")
    assert alert.text == "routes are one token late; since step 2"


@pytest.mark.parametrize(("begins", "reported_again"), [(2, ""), (8, LATE_REPORTED.format(8, 8))])
def test_wrong_routes_from_before_the_checkpoint_are_not_reported_again(
    begins: int, reported_again: str, tmp_path: Path
) -> None:
    captures = {step: routing_report([0], anomalies=[LATE] * (step in (begins, begins + 1))) for step in range(1, 12)}
    assert log_captures(tmp_path, captures) == LATE_REPORTED.format(begins, begins)
    rest = {step: report for step, report in captures.items() if step > 6}
    assert log_captures(tmp_path, rest, resumed_after=6) == reported_again


def test_missing_routes_are_reported_when_they_last(tmp_path: Path) -> None:
    reported = log_captures(tmp_path, {step: routing_report([0], missing=[13 * (step > 2)]) for step in range(1, 8)})
    assert reported.startswith(
        "warning: step 5: 33.3% of the routes of rollouts are missing, and some have been since step 3: "
    )
    assert "\n" not in reported


def test_a_validation_between_the_steps_ends_no_episode() -> None:
    watch = AlertWatch(settings_for(Path()).alerts, TOPK)
    reported: list[str] = []
    for step in range(8):
        reported += [alert.line for alert in watch.observe(step, {"val/loss": 1.0})]
        reported += [
            alert.line
            for alert in watch.observe(step, {"train/loss": 1.0}, SICK.layers, SICK.counts.numpy())
            if step > 0
        ]
    assert len(reported) == 1


def test_layers_with_the_same_finding_share_a_line() -> None:
    def found(layer: int) -> Finding:
        return Finding("imbalance", layer, 4, 9, False, f"layer {layer}: uneven")

    (alert,) = alerts_of(9, [found(3)])
    assert alert == Alert("step 9: layer 3: uneven", "imbalance at step 9", "layer 3: uneven")
    (alert,) = alerts_of(9, [found(3), found(5)])
    assert alert.line == "step 9: layer 3: uneven (likewise layer 5)"
    overload = Finding("overload", None, 4, 9, False, "overloaded")
    imbalance, other = alerts_of(9, [overload, *map(found, range(48))])
    assert imbalance.line == "step 9: layer 0: uneven (likewise layers 1, 2, 3, 4, 5, 6, 7, 8, 39 more)"
    assert imbalance.text.splitlines()[-2:] == ["layer 19: uneven", "and 28 more layers"]
    assert other.line == "step 9: overloaded"
    assert alerts_of(9, []) == []


def test_alerts_can_be_switched_off(tmp_path: Path) -> None:
    stream = io.StringIO()
    with build_loggers(settings_for(tmp_path), tmp_path, ConsoleLogger(9, stream=stream), topk=TOPK) as loggers:
        for step in range(1, 9):
            loggers.log_artifact(step, EXPERT_LOAD.name, SICK)
            loggers.log_step(step, {"train/loss": 1.0})
    assert "warning" not in stream.getvalue()


@pytest.mark.parametrize("name", ["sft.yaml", "dpo.yaml", "rm.yaml", "grpo.yaml"])
def test_the_shipped_thresholds_pass_over_a_router_that_evens_out_and_find_a_hot_rank(name: str) -> None:
    """The demo's first five steps send nothing to a quarter of the experts of a layer."""
    evening_out, hot = AlertWatch(shipped_alerts(name), TOPK), AlertWatch(shipped_alerts(name), TOPK)
    random = np.random.default_rng(0)
    reported: list[str] = []
    for step in range(1, 41):
        share = np.ones(8) if step > 6 else np.array([0, 0, 1, 1, 1, 2, 6, 8.0])
        counts = random.multinomial(6000, share / share.sum(), size=4)
        overload = {"train/moe/avg_overload_factor": 1.05 if step > 6 else 1.7}
        assert evening_out.observe(step, overload, range(4), counts) == []
        counts = random.multinomial(6000, np.repeat([0, 0.25], 4), size=4)
        reported += [a.title for a in hot.observe(step, {"train/moe/avg_overload_factor": 2.0}, range(4), counts)]
    kinds = [title.rpartition(" at step ")[0] for title in reported]
    assert kinds == ["dead experts", "imbalance", "overload"]
