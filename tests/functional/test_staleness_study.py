# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The staleness study as a user starts it: tiny runs of an exact lag, each made once."""

from pathlib import Path

import pytest

from examples.staleness_study.__main__ import main
from examples.staleness_study.grid import Method, Run
from nemo_rl_moe.demo_data import main as make_data
from tests.conftest import REPOSITORY_ROOT

TIS = Method("tis", "none")


@pytest.mark.slow
def test_two_runs_have_their_lags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_data(["--output", str(tmp_path / "data"), "--seed", "0"])
    tiny = str(REPOSITORY_ROOT / "examples/assets/tiny_qwen3_moe")
    few = ["policy.init=random", "grpo.max_num_steps=4", "grpo.num_prompts_per_step=4", "grpo.max_val_samples=4"]
    few += [
        "policy.train_global_batch_size=32",
        "policy.train_micro_batch_size=32",
        "policy.generation.max_new_tokens=8",
    ]
    words = ["run", "--corrections", "tis", "--lags", "0,2", "--seeds", "1", "--replays", "none", "--model", tiny]
    assert main([*words, "--output", str(tmp_path), *few]) == 0
    assert main(["tables", "--output", str(tmp_path)]) == 0
    runs = [Run(TIS, lag, 0) for lag in (0, 2)]
    results = [(tmp_path / "runs" / run.name / "result.json").read_text() for run in runs]
    assert ['"staleness": 0.0' in results[0], '"staleness": 2.0' in results[1]] == [True, True]
    assert main([*words, "--output", str(tmp_path), *few]) == 0
    assert "2 runs, 2 of them done" in capsys.readouterr().out
