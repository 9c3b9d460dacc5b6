# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import json
import math
from pathlib import Path

import numpy as np
import pytest

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.runs.folder.run_data import read_run
from nemo_rl_moe.runs.report.run_findings import thresholds_of
from tests.support.made_runs import make_run, random_counts


def test_reads_back_what_a_run_wrote(tmp_path: Path) -> None:
    counts = random_counts(3, 2, 4, 50)
    config = {"grpo": {"max_num_steps": 9}, "policy": {"megatron_cfg": {"expert_model_parallel_size": 2}}}
    metrics = {1: {"train/loss": 2.0}, 2: {"train/loss": 1.5, "val/loss": 9.0}, 3: {"train/loss": math.nan}}
    run = read_run(make_run(tmp_path / "logs" / "exp_001", metrics, counts, layers=[1, 3], config=config))
    assert run.name == "logs/exp_001"
    assert run.metrics.keys() == {"train/loss", "val/loss"}
    np.testing.assert_array_equal(run.metrics["train/loss"].steps, [1, 2, 3])
    np.testing.assert_array_equal(run.metrics["train/loss"].values, [2.0, 1.5, math.nan])
    np.testing.assert_array_equal(run.metrics["val/loss"].steps, [2])
    assert run.expert_load is not None
    np.testing.assert_array_equal(run.expert_load.counts, counts)
    assert (run.expert_load.steps.tolist(), run.expert_load.layers.tolist()) == ([1, 2, 3], [1, 3])
    assert (run.algorithm, run.planned_steps, run.expert_parallel_size, run.topk) == ("grpo", 9, 2, 2)
    assert (run.last_step, run.notes) == (3, [])


def test_a_run_is_of_the_algorithm_whose_section_comes_first(tmp_path: Path) -> None:
    # As `dump_resolved` has them: PPO and distillation have their loop in the section of GRPO.
    config = {"ppo": {"gae_lambda": 0.95}, "grpo": {"max_num_steps": 9}, "policy": {}}
    run = read_run(make_run(tmp_path / "run", {1: {"train/loss": 2.0}}, config=config))
    assert (run.algorithm, run.planned_steps) == ("ppo", 9)
    own = {"algorithm": "my_module:ALGORITHM", "opd": {}, "grpo": {"max_num_steps": 9}}
    assert read_run(make_run(tmp_path / "own", {1: {"train/loss": 2.0}}, config=own)).algorithm == "opd"


def test_a_last_line_that_a_crash_cut_is_passed_over(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", {1: {"train/loss": 2.0}, 2: {"train/loss": 1.0}}, random_counts(1, 1, 4, 9))
    path = folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    (folder / "expert_load.parquet" / ".steps-00000002-00000002.parquet.incomplete").write_bytes(b"PAR1")
    run = read_run(folder)
    assert run.metrics["train/loss"].steps.tolist() == [1]
    assert run.last_step == 1


def test_of_a_step_that_stands_twice_the_later_line_counts(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", {1: {"train/loss": 5.0}, 2: {"train/loss": 4.0}, 3: {"train/loss": 3.0}})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "time": 0, "metrics": {"train/loss": 4.5}}) + "\n")
    series = read_run(folder).metrics["train/loss"]
    assert (series.steps.tolist(), series.values.tolist()) == ([1, 2, 3], [5.0, 4.5, 3.0])


def test_a_run_at_its_very_beginning(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    run = read_run(tmp_path)
    assert (run.metrics, run.expert_load, run.config, run.last_step) == ({}, None, {}, 0)
    assert (run.algorithm, run.planned_steps, run.expert_parallel_size, run.topk) == (None, None, 1, None)


def test_what_is_damaged_is_noted_and_the_rest_is_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", {1: {"train/loss": 1.0}}, random_counts(2, 1, 4, 9))
    (folder / "config.yaml").write_text("sft: [1,\n")
    (folder / "effective_moe_configuration.json").write_text("{")
    (folder / "expert_load.parquet" / "steps-00000002-00000002.parquet").write_bytes(b"PAR1 nothing PAR1")
    run = read_run(folder)
    assert run.metrics["train/loss"].values.tolist() == [1.0]
    assert (run.config, run.moe_configuration, run.expert_load) == ({}, {}, None)
    damaged = ["steps-00000002-00000002.parquet", "config.yaml", "effective_moe_configuration.json"]
    for note, name in zip(run.notes, damaged, strict=True):
        assert f"{name}: cannot be read" in note


def test_a_folder_above_the_runs_names_the_last_one(tmp_path: Path) -> None:
    for name in ("exp_999", "exp_1000", "other"):
        make_run(tmp_path / name, {})
    (tmp_path / "exp_1001").mkdir()
    with pytest.raises(DataError, match=r"holds no metrics\.jsonl; did you mean .*exp_1000\?$"):
        read_run(tmp_path)
    with pytest.raises(DataError, match="expected a run's folder, such as logs/sft/exp_001"):
        read_run(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "config",
    ["policy: x", "policy: {megatron_cfg: [1]}", "grpo: {max_num_steps: x}\nlogger: {alerts: 3}", "logger: 1", "1: 2"],
)
def test_settings_of_another_type_are_as_if_they_were_not_there(tmp_path: Path, config: str) -> None:
    folder = make_run(tmp_path / "run", {1: {"train/loss": 1.0}}, in_force={"moe_router_topk": "x"})
    (folder / "config.yaml").write_text(config)
    run = read_run(folder)
    assert (run.planned_steps, run.expert_parallel_size, run.topk) == (None, 1, None)
    assert thresholds_of(run.config) == thresholds_of({})


@pytest.mark.parametrize("text", ["[" * 3000, "\n".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(40))])
def test_a_configuration_that_grows_when_it_is_written_out_is_noted(tmp_path: Path, text: str) -> None:
    folder = make_run(tmp_path / "run", {1: {"train/loss": 1.0}})
    (folder / "config.yaml").write_text(text.replace("[*a-1, *a-1]", "[x, x]"))
    run = read_run(folder)
    assert run.config == {}
    assert "config.yaml: cannot be read: " in run.notes[0]
