# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The staleness study's grid, its schedules of an exact lag, and its tables, against values worked out by hand."""

from itertools import pairwise, product
from pathlib import Path

import pytest

from examples.staleness_study.__main__ import main
from examples.staleness_study.configuration import scheduled_steps, study_of, write_schedule
from examples.staleness_study.grid import CORRECTIONS, LAGS, REPLAYS, Method, Run, plan
from examples.staleness_study.measures import MEASURES, Results
from examples.staleness_study.tables import difference, draw, tables
from examples.staleness_study.tasks import TASKS
from examples.studies.results import Result, measures_of
from nemo_rl_moe.config.environments.tools import ToolsConfig
from nemo_rl_moe.config.loading import dump_resolved, load_grpo_config
from nemo_rl_moe.rollouts.dispatch.schedule import read_schedule
from tests.conftest import REPOSITORY_ROOT

ADDITION = TASKS["addition"].config
CLIPPED, TIS = Method("clipped", "none"), Method("tis", "none")


def test_grid() -> None:
    runs = plan(list(CORRECTIONS), list(REPLAYS), LAGS, range(2))
    assert len(runs) == len({run.name for run in runs}) == 2 * 4 * 2 * 5
    assert all(before.seed <= after.seed for before, after in pairwise(runs)), "stopped, cells have the same seeds"
    assert [run.lag for run in plan(["tis"], ["none"], (8, 0), range(1))] == [0, 8]


@pytest.mark.parametrize("task", TASKS)
def test_every_cell_is_a_valid_configuration_of_its_own(task: str) -> None:
    seen = set()
    for correction, replay in product(CORRECTIONS, REPLAYS):
        overrides = Run(Method(correction, replay), 2, 5).overrides("schedule.jsonl")
        config = load_grpo_config(TASKS[task].config, overrides, check_paths=False)
        assert isinstance(config.env.driver, ToolsConfig) == (task == "calculator")
        assert config.grpo.seed == 5
        assert config.grpo.rollouts.replay_schedule == "schedule.jsonl"
        seen.add(str(dump_resolved(config)))
    assert len(seen) == 4 * 2


@pytest.mark.parametrize("updates", [1, 2])
def test_a_schedule_samples_each_group_so_many_steps_earlier(tmp_path: Path, updates: int) -> None:
    prompts = tmp_path / "grpo.jsonl"
    prompts.write_text("{}\n" * 100)
    overrides = [
        f"policy.train_global_batch_size={128 // updates}",
        "grpo.max_num_steps=5",
        "grpo.rollouts.replay_schedule=schedule.jsonl",
        f"grpo.rollouts.max_staleness={2 * updates}",
    ]
    config = load_grpo_config(ADDITION, overrides, check_paths=False)
    steps = scheduled_steps(prompts, config, lag=2)
    assert [step.version for step in steps] == [updates * step for step in range(5)]
    versions = [{group.version for group in step.groups} for step in steps]
    assert versions == [{0}, {0}, {0}, {updates}, {2 * updates}]
    names = [group.sample_id for step in steps for group in step.groups]
    assert len(names) == len(set(names)) == 5 * 16
    assert names == [group.sample_id for step in scheduled_steps(prompts, config, lag=0) for group in step.groups]
    for _ in range(2):
        write_schedule(tmp_path / "schedule.jsonl", steps)
    assert read_schedule(tmp_path / "schedule.jsonl") == steps


def test_settings_of_a_run(tmp_path: Path) -> None:
    for name in ("grpo.jsonl", "validation_prompts.jsonl"):
        (tmp_path / name).write_text("{}\n" * 40)
    tiny = str(REPOSITORY_ROOT / "examples/assets/tiny_qwen3_moe")
    study = study_of(tmp_path, ADDITION, tiny, tmp_path, ["policy.init=random"])
    config = study.config(Run(Method("cispo", "r3"), 4, 3))
    assert (config.loss_fn.objective, config.policy.megatron_cfg.routing_replay) == ("cispo", "rollout")
    assert len(read_schedule(Path(str(config.grpo.rollouts.replay_schedule)))) == 2


def result_of(**measures: float) -> Result:
    return Result(10.0, {name.replace("_", " "): value for name, value in measures.items()})


def made_results() -> Results:
    accuracies = {(CLIPPED, 0): [0.70, 0.72, 0.74], (CLIPPED, 8): [0.69, 0.72, 0.72], (TIS, 8): [0.5]}
    results = {
        Run(method, lag, seed): result_of(accuracy=value, mismatch=1e-3 * (lag + 1))
        for (method, lag), values in accuracies.items()
        for seed, value in enumerate(values)
    }
    results[Run(TIS, 8, 1)] = Result(5.0, {}, diverged="3 updates in a row were skipped")
    return results


def test_tables_pair_seeds_and_claim_nothing_of_few(tmp_path: Path) -> None:
    text = tables(made_results())
    # Differences -0.01, 0, -0.02: mean -0.01, standard error 0.01 / sqrt(3), times 4.30265.
    assert "| clipped | 0 | - | - | - | -0.010 (-0.035 to +0.015), n 3 |" in text
    assert "Diverged, and in no mean: tis-none-lag8-s01." in text
    assert "no difference seen" not in text, "three seeds"
    draw(made_results(), tmp_path / "study.png")
    assert (tmp_path / "study.png").stat().st_size > 5_000


def test_a_claim_needs_twelve_seeds_and_an_interval_without_zero() -> None:
    results: Results = {}
    for seed in range(12):
        noise = 0.01 * (seed % 3)
        results[Run(CLIPPED, 0, seed)] = result_of(accuracy=0.8)
        results[Run(CLIPPED, 2, seed)] = result_of(accuracy=0.79 + noise)
        results[Run(CLIPPED, 8, seed)] = result_of(accuracy=0.7 + noise)
    text = tables(results)
    assert "- clipped, lag 2: accuracy no difference seen, +0.000 (-0.005 to +0.005), n 12." in text
    assert "- clipped, lag 8: accuracy lower, -0.090 (-0.095 to -0.085), n 12." in text
    del results[Run(CLIPPED, 0, 11)]
    assert "lag 8: accuracy lower" not in tables(results)
    found = difference(results, CLIPPED, 8)
    assert found is not None
    assert found.count == 11


def test_measures_of_a_run() -> None:
    history = {"val/accuracy": [(30, 0.7)], "train/staleness/mean": [(1, 0.0), (2, 1.0), (3, 2.0)]}
    assert measures_of(history, MEASURES) == {"accuracy": 0.7, "staleness": 2.0}


def test_dry_run_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--corrections", "tis", "--replays", "none", "--lags", "8,0", "--jobs", "2", "--dry-run"]
    assert main([*words, "--output", str(tmp_path / "study")]) == 0
    assert capsys.readouterr().out == "24 runs, 0 of them done; the others take about 0.3 h\n"
    assert not (tmp_path / "study").exists()
    with pytest.raises(SystemExit):
        main(["run", "--lags", "3"])
    assert "got 3, expected some of 0,1,2,4,8" in capsys.readouterr().err


def test_tables_of_an_empty_folder_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tables", "--output", str(tmp_path)]) == 2
    assert "no run is done" in capsys.readouterr().err
