# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""GRPO whose trajectories an agent drives by the `openai` client: training sees what the endpoint has sampled."""

import math
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.functional import grpo_runs, run_kills, sft_runs

pytestmark = pytest.mark.shared_ray
START_LIMIT_S, END_LIMIT_S = 240.0, 120.0
NUM_STEPS = 2


def settings(folder: Path, **changes: object) -> list[str]:
    agent = {
        "policy__model_name": sft_runs.REPOSITORY_ROOT / "examples/assets/tiny_qwen3_moe_tools",
        "policy__max_total_sequence_length": 400,
        "policy__generation__max_new_tokens": 12,
        "policy__megatron_cfg__routing_replay": "rollout",
        "env__driver__kind": "agent",
        "env__driver__program": "tests.support.agents_of_tests:asks_twice",
        "env__driver__limits__num_workers": 3,
        "env__reward_weights": {"digits": 1.0, "short": 0.5},
        "env__reward__kind": "callable",
        "env__reward__function": "tests.functional.grpo_runs:share_of_digits",
        "env__score_truncated": True,
        "grpo__max_num_steps": NUM_STEPS,
        "data__validation": None,
        **changes,
    }
    data = grpo_runs.make_prompts(folder / "data", 12)
    return grpo_runs.settings(folder, data, **agent, **sft_runs.only_jsonl())


Outcome = tuple[list[dict[str, float]], list[dict[str, Any]]]


def trained(folder: Path) -> Outcome:
    """Return the metrics of the steps of a run that has ended well, and its samples."""
    grpo_runs.run_here(settings(folder), folder)
    return sft_runs.outcome_of(folder)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return trained(tmp_path_factory.mktemp("agent"))


def test_what_an_agent_asks_for_is_trained_on(outcome: Outcome) -> None:
    steps, samples = outcome
    assert len(steps) == NUM_STEPS
    assert all(sample["num_turns"] == 2 for sample in samples)
    for metrics in steps:
        assert math.isfinite(metrics["train/loss"])
        assert metrics["train/mean_turns_per_sample"] == 2
        assert metrics["train/env/failed_share"] == 0
        assert metrics["train/agent/refused_requests"] == 0
        # Training sees the tokens of all turns as generation saw them.
        assert abs(metrics["train/token_mult_prob_error"] - 1) < 1e-5
        # T12 to T14: experts of every token, those of the pass that sampled it, over several turns.
        assert metrics["train/moe/routing/rows_usable_share"] == 1
        assert metrics["train/moe/routing/live_agreement"] == 1
        assert metrics["train/moe/routing/anomalies"] == 0
        assert metrics["train/reward"] == pytest.approx(
            metrics["train/rewards/digits/mean"] + 0.5 * metrics["train/rewards/short/mean"]
        )


@pytest.mark.full
def test_in_lockstep_a_run_repeats_however_the_agents_were_scheduled(outcome: Outcome, tmp_path: Path) -> None:
    (steps, samples), (steps_again, samples_again) = outcome, trained(tmp_path)
    assert [sample["response"] for sample in samples_again] == [sample["response"] for sample in samples]
    names = ("train/loss", "train/reward", "train/grad_norm", "train/sampling_logp_difference", "train/gen_kl_error")
    assert [[each[name] for name in names] for each in steps_again] == [
        [each[name] for name in names] for each in steps
    ]


@pytest.mark.full
@pytest.mark.parametrize("backend", ["megatron", "megatron_separate"])
def test_requests_of_an_agent_overlap(backend: str, tmp_path: Path) -> None:
    """In lockstep they repeat as well. Another engine answers each at once."""
    changes = {
        "env__driver__program": "tests.support.agents_of_tests:asks_at_once",
        "env__reward_weights": None,
        "env__reward": None,
        "policy__generation__backend": backend,
        "grpo__adv_estimator__name": "turn_grpo",
    }
    outcomes: list[Outcome] = []
    for name in ("first", "again") if backend == "megatron" else ("first",):
        places = [] if backend == "megatron" else ["+cluster.roles.generation={}"]
        grpo_runs.run_here([*settings(tmp_path / name, **changes), *places], tmp_path / name)
        outcomes.append(sft_runs.outcome_of(tmp_path / name))
    steps, samples = outcomes[0]
    assert all((sample["num_turns"], sample["num_sequences"]) == (4, 3) for sample in samples)
    for metrics in steps:
        assert abs(metrics["train/token_mult_prob_error"] - 1) < 1e-5
        assert metrics["train/mean_turn_rewards_per_sample"] == pytest.approx(metrics["train/reward"])
        assert metrics["train/moe/routing/rows_usable_share"] == 1
        assert metrics["train/moe/routing/anomalies"] == 0
    for each in outcomes[1:]:
        assert [sample["response"] for sample in each[1]] == [sample["response"] for sample in samples]
        assert [step["train/loss"] for step in each[0]] == [step["train/loss"] for step in steps]


@pytest.mark.slow
def test_agents_of_a_run_listen_on_loopback_alone_and_none_outlives_it(tmp_path: Path) -> None:
    """One agent in each step hangs until its limit, and has a child."""
    hanging = settings(
        tmp_path,
        env__driver__program="tests.support.agents_of_tests:hangs_at_times",
        env__rollout_timeout_s=5.0,
        env__reward_weights=None,
    )
    seen: set[tuple[str, str]] = set()
    agents: set[psutil.Process] = set()

    def look(run: run_kills.Run) -> bool:
        seen.update(run.listening())
        agents.update(each for each in run.family() if "agents.worker" in _command_of(each))
        return f"step {NUM_STEPS}/" in run.printed

    with run_kills.running(grpo_runs.command(hanging), tmp_path / "work") as run:
        run.wait_for(lambda: look(run), 2 * START_LIMIT_S)
        assert run.wait_for_end(START_LIMIT_S) == 0, run.errors
        run.wait_until_nothing_runs(END_LIMIT_S)
    assert len(agents) >= 3
    assert not [each for each in agents if each.is_running()]
    assert {address for address, _ in seen} <= run_kills.LOOPBACK, seen


def _command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
