# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The demo with a tool as a user starts it, in a few steps: fine-tuning, the runs, the table and the pictures."""

from pathlib import Path

import numpy as np
import pytest

from examples.tools_demo.__main__ import main
from examples.tools_demo.data import main as make_data
from nemo_rl_moe.runs.folder.writer_load import read_writer_load
from nemo_rl_moe.token_writers import WRITERS
from tests.conftest import REPOSITORY_ROOT
from tests.functional import sft_runs

FEW = (
    "sft.max_num_steps=60",
    "sft.val_period=0",
    "grpo.max_num_steps=2",
    "grpo.num_prompts_per_step=4",
    "grpo.max_val_samples=16",
    "grpo.val_num_generations=1",
    "policy.train_global_batch_size=32",
    "policy.train_micro_batch_size=16",
    "logger.wandb_enabled=false",
    "logger.mlflow_enabled=false",
    "logger.tensorboard_enabled=false",
    "checkpointing.save_period=0",
)


@pytest.mark.slow
def test_it_trains_a_model_that_calls_and_a_control_and_reports(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY_ROOT)
    assert make_data(["--output", str(tmp_path / "data"), "--num-train", "2000"]) == 0
    # A mistake at the start is told, and leaves nothing behind that the next start would mind.
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["--output", str(tmp_path / "demo"), "--data", str(tmp_path / "data"), "sft.max_num_step=1"])
    assert "did you mean sft.max_num_steps?" in capfd.readouterr().err
    words = ["--seeds", "1", "--output", str(tmp_path / "demo"), "--data", str(tmp_path / "data"), *FEW]
    assert main(words) == 0
    printed = capfd.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[:2] for row in rows[1:]] == [
        ["| with the calculator", "1"],
        ["| control: without it", "1"],
    ]
    # Without the tool there are no calls.
    assert rows[-1].endswith("| 0.00 to 0.00 | 0.00 to 0.00 | 0.00 to 0.00 |")
    with_tool, without = (next((tmp_path / "demo" / name / "logs").glob("exp_*")) for name in ("tool-1", "no_tool-1"))
    # After some steps the model writes calls, and some of them are well formed.
    steps = sft_runs.steps_of(with_tool)
    assert sum(metrics["train/tools/calls"] - metrics["train/tools/wrong_calls"] for metrics in steps) > 0
    assert all(abs(metrics["train/token_mult_prob_error"] - 1) < 1e-5 for metrics in steps)
    samples = sft_runs.samples_of(with_tool)
    # A call costs also where its result does not fit, and no response follows.
    called = [sample for sample in samples if sample.get("num_turns", 1) > 1]
    assert called
    assert all(sample["reward"] < sample["is_correct"] for sample in called)
    assert not all(sample["reward"] < sample["is_correct"] for sample in samples)
    load = read_writer_load(with_tool)
    assert load.counts.shape == (len(load.steps), len(WRITERS), 4, 8)
    assert (load.counts.sum((2, 3)) > 0).all()
    # Each token goes to two experts in each layer.
    assert (np.ptp(load.counts.sum(3), axis=2) == 0).all()
    assert not (without / "experts_by_writer.parquet").exists()
    assert sorted(path.name for path in (tmp_path / "demo").glob("*.png")) == ["experts_by_writer.png", "learning.png"]
    # What is done is not done again.
    assert main(words) == 0
    assert "nemo-rl-moe" not in capfd.readouterr().out
    assert main([*words[:-1], "checkpointing.save_period=1"]) == 2
    assert "its runs have the overrides" in capfd.readouterr().err
