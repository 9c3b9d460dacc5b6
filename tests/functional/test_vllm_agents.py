# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Agents that ask real vLLM engines, each request answered at once: training sees what was sampled.

How far training and vLLM differ on the same tokens is measured by a synchronous run without agents, in the same
environment: that is the noise, and a run with agents may have a few times as much, as its sequences are longer.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME, read_metrics
from tests.functional import grpo_runs, run_kills, sft_runs
from tests.functional.drill_moments import last_step
from tests.support.vllm_engines import vllm_tests

pytestmark = vllm_tests(900)

NUM_STEPS = 2
LIMIT_S = 600.0
TIMES_THE_NOISE = 4.0
WIDEST_NOISE = 1e-3
"""Nats: a run without agents that differs more is itself at fault."""
DIFFERENCES = ("train/sampling_logp_difference_max", "train/sampling_logp_difference", "train/gen_kl_error")
SYNCHRONOUS, ASYNCHRONOUS = "grpo_tiny_moe_vllm.yaml", "grpo_tiny_moe_async.yaml"
AGENT: dict[str, Any] = {
    "env__driver__kind": "agent",
    "env__driver__program": "tests.support.agents_of_tests:asks_twice",
    "env__driver__limits__num_workers": 3,
    "env__reward_weights": {"digits": 1.0, "short": 0.5},
}
Steps = list[dict[str, float]]


def command(folder: Path, exemplar: str, **changes: Any) -> list[str]:
    values = {
        "policy__model_name": sft_runs.REPOSITORY_ROOT / "examples/assets/tiny_qwen3_moe_tools",
        "policy__max_total_sequence_length": 400,
        "policy__megatron_cfg__routing_replay": "rollout",
        "policy__megatron_cfg__optimizer__lr": 1e-3,
        "env__reward__kind": "callable",
        "env__reward__function": "tests.functional.grpo_runs:share_of_digits",
        "env__score_truncated": True,
        "grpo__max_num_steps": NUM_STEPS,
        "data__validation": None,
        **changes,
    }
    data = grpo_runs.make_prompts(folder / "data", 20)
    overrides = grpo_runs.settings(folder, data, **values, **sft_runs.only_jsonl())
    return grpo_runs.command(overrides, grpo_runs.EXEMPLAR.with_name(exemplar))


def trained(folder: Path, exemplar: str = SYNCHRONOUS, **changes: Any) -> Steps:
    """Return the metrics of the steps of a run; nothing of it is left."""
    with run_kills.running(command(folder, exemplar, **changes), folder / "work") as run:
        assert run.wait_for_end(LIMIT_S) == 0, run.printed + run.errors
        run.wait_until_nothing_runs(60.0)
    return steps_of(folder)


def steps_of(folder: Path) -> Steps:
    records = read_metrics(sft_runs.only_run_folder(folder) / METRICS_FILE_NAME)
    return [record.metrics for record in records if "train/loss" in record.metrics]


def largest(steps: Steps, name: str) -> float:
    return max(abs(metrics[name]) for metrics in steps)


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Largest differences between training and vLLM without agents, by metric."""
    steps = trained(tmp_path_factory.mktemp("without"))
    assert len(steps) == NUM_STEPS
    found = {name: largest(steps, name) for name in DIFFERENCES}
    assert max(found.values()) < WIDEST_NOISE
    return found


def test_what_agents_ask_for_is_trained_on_as_it_was_sampled(noise: dict[str, float], tmp_path: Path) -> None:
    steps = trained(tmp_path, **AGENT)
    assert len(steps) == NUM_STEPS
    for metrics in steps:
        assert metrics["train/mean_turns_per_sample"] == 2
        assert metrics["train/env/failed_share"] == 0
        assert metrics["train/agent/refused_requests"] == 0
        assert metrics["train/moe/routing/rows_usable_share"] == 1
    for name in DIFFERENCES:
        assert largest(steps, name) <= TIMES_THE_NOISE * noise[name], name


@pytest.mark.slow
def test_agents_go_on_while_the_weights_change(noise: dict[str, float], tmp_path: Path) -> None:
    """Old tokens are trained on by newer weights: only of steps without a lag the difference is noise."""
    steps = trained(tmp_path, ASYNCHRONOUS, **AGENT)
    assert len(steps) == NUM_STEPS
    assert all(metrics["train/mean_turns_per_sample"] == 2 for metrics in steps)
    assert all(metrics["train/env/failed_share"] == 0 for metrics in steps)
    fresh = [metrics for metrics in steps if metrics["train/staleness/max"] == 0]
    assert fresh
    for name in DIFFERENCES:
        assert largest(fresh, name) <= TIMES_THE_NOISE * noise[name], name


@pytest.mark.slow
def test_an_engine_that_is_killed_costs_agents_no_reply(noise: dict[str, float], tmp_path: Path) -> None:
    agent = {
        **AGENT,
        "env__driver__kind": "agent",
        "env__driver__program": "tests.support.agents_of_tests:asks_many_times",
        "env__reward_weights": None,
    }
    with run_kills.running(command(tmp_path, SYNCHRONOUS, **agent), tmp_path / "work") as run:
        run.wait_for(lambda: last_step(run) >= 1, LIMIT_S)
        (engine, *_) = run.find("engine")
        os.kill(engine.pid, signal.SIGKILL)
        ports = run.ports()
        assert run.wait_for_end(LIMIT_S) == 0, run.printed + run.errors
        run.wait_until_nothing_runs(60.0)
        assert "vLLM engine 0 died" in run.printed + run.errors
    assert not run_kills.ports_in_use(ports)
    steps = steps_of(tmp_path)
    assert len(steps) == NUM_STEPS
    for metrics in steps:
        assert metrics["train/mean_turns_per_sample"] == 4
        assert metrics["train/env/failed_share"] == 0
    assert largest(steps, DIFFERENCES[0]) <= TIMES_THE_NOISE * noise[DIFFERENCES[0]]
