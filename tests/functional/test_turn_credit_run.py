# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A run whose environment rewards turns, with credit by turn."""

import math
from pathlib import Path

import pytest

from nemo_rl_moe.rewards.interface import Score
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.trajectory import Trajectory
from tests.functional import grpo_runs, sft_runs

pytestmark = [pytest.mark.shared_ray, pytest.mark.full]


async def rewarded(session: Session) -> Trajectory:
    """One turn or two; each is rewarded for its digits, and the last one by a score."""
    digits = 0
    for number in range(1 + session.seed % 2):
        if number:
            session.append_text("1+1=")
        turn = await session.generate()
        digits = sum(character.isdigit() for character in turn.text)
        session.reward(digits / 8)
    return session.finish(Score(1.0, is_correct=digits > 2), {"env/last_digits": float(digits)})


def test_a_run_gives_credit_by_turn(tmp_path: Path) -> None:
    data = grpo_runs.make_prompts(tmp_path / "data", 12)
    turns = {
        "env__driver__kind": "function",
        "env__driver__function": "tests.functional.test_turn_credit_run:rewarded",
        "grpo__adv_estimator__name": "turn_grpo",
        "policy__generation__max_new_tokens": 6,
        "grpo__max_num_steps": 2,
        "data__validation": None,
    }
    grpo_runs.run_here(grpo_runs.settings(tmp_path, data, **turns, **sft_runs.only_jsonl()), tmp_path)
    steps, samples = sft_runs.outcome_of(tmp_path)
    assert len(steps) == 2
    for metrics in steps:
        assert metrics["train/reward"] == pytest.approx(1.0 + metrics["train/mean_turn_rewards_per_sample"])
        assert 1.0 < metrics["train/mean_turns_per_sample"] < 2.0
        assert metrics["train/truncation_rate_by_turns"] == metrics["train/truncation_rate_by_time"] == 0.0
        assert metrics["train/advantages/min"] < 0 < metrics["train/advantages/max"]
        assert math.isfinite(metrics["train/loss"])
        assert metrics["train/grad_norm"] > 0
        assert abs(metrics["train/token_mult_prob_error"] - 1) < 1e-5
    assert {sample.get("num_turns", 1) for sample in samples} == {1, 2}
