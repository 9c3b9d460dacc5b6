# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A run whose environment, estimator, objective and logger are the user's own."""

import json
from pathlib import Path

import pytest

from tests.functional import grpo_runs, sft_runs
from tests.support.custom_parts import NAME

pytestmark = pytest.mark.shared_ray


def test_own_parts_take_part_in_a_run(tmp_path: Path) -> None:
    data = grpo_runs.make_prompts(tmp_path / "data", 12)
    own = {
        "env__reward__kind": "custom",
        "env__reward__factory": f"{NAME}:Digits",
        "env__reward__parameters": "{least: 3, step: 0.5}",
        "grpo__adv_estimator__name": f"{NAME}:from_median",
        "loss_fn__objective": f"{NAME}:doubled",
        "logger__backends": f"[{NAME}:LinesLogger]",
        "grpo__max_num_steps": 2,
    }
    settings = grpo_runs.settings(tmp_path, data, **own, **sft_runs.only_jsonl())
    grpo_runs.run_here(settings, tmp_path)
    run_folder = sft_runs.only_run_folder(tmp_path)
    steps = sft_runs.steps_of(run_folder)
    assert len(steps) == 2
    for metrics in steps:
        # Multiples of the parameter, of 16 responses.
        assert metrics["train/reward"] * 16 % 0.5 == 0
        assert metrics["train/env/num_errors"] == 0
        # With the median as baseline some response of each group has no advantage, and they do not add up to 0.
        assert metrics["train/advantages/max"] % 0.5 == 0
    lines = [json.loads(line) for line in (run_folder / "lines.jsonl").read_text().splitlines()]
    assert "policy" in lines[0]["sections"]
    assert [line["step"] for line in lines[1:] if line["step"]] == [1, 2]
    assert "train/reward" in lines[-1]["keys"]
