# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The routing study's grid, its way of going on, and its intervals, against values worked out by hand."""

import math
from itertools import pairwise, product
from pathlib import Path

import pytest

from examples.routing_study.__main__ import main
from examples.routing_study.configuration import STUDY_CONFIG, study_of
from examples.routing_study.grid import DTYPES, METHODS, UPDATES, Condition, Run, hours_left, plan
from examples.routing_study.measures import MEASURES, Results
from examples.routing_study.tables import draw, start_check, tables
from examples.studies.intervals import (
    geometric,
    interval,
    paired_differences,
    paired_factors,
    student_quantile,
    student_share,
)
from examples.studies.results import RESULT_FILE, Result, measures_of, read_result, read_results
from examples.studies.session import claimed, make_runs
from nemo_rl_moe.config.loading import dump_resolved, load_grpo_config
from nemo_rl_moe.distributed.run_process import StopSignals
from nemo_rl_moe.errors import ConfigurationError, DataError
from tests.conftest import REPOSITORY_ROOT

PLACE = Condition("small", "bfloat16", 8)


@pytest.mark.parametrize(
    ("freedom", "quantile"),  # of tables of Student's t
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (23, 2.0687), (120, 1.9799)],
)
def test_quantiles_of_student(freedom: int, quantile: float) -> None:
    assert student_quantile(freedom) == pytest.approx(quantile, abs=5e-5)


def test_shares_of_student_in_closed_form() -> None:
    for t in (0.0, 0.3, 1.0, 7.0):
        assert student_share(t, 1) == pytest.approx(2 / math.pi * math.atan(t))
        assert student_share(t, 2) == pytest.approx(t / math.sqrt(2 + t * t))


def test_interval_by_hand() -> None:
    found = interval([1.0, 2.0, 3.0])  # standard deviation 1, two degrees of freedom: 4.30265 / sqrt(3)
    assert found is not None
    assert (found.mean, found.count) == (2.0, 3)
    assert (found.low, found.high) == pytest.approx((2 - 2.484138, 2 + 2.484138), abs=1e-5)
    assert found.holds_zero
    shifted = interval([11.0, 12.0, 13.0])
    assert shifted is not None
    assert not shifted.holds_zero
    assert interval([4.0]) is None, "a lone run says nothing"
    with pytest.raises(ValueError, match="not finite"):
        interval([1.0, math.nan])


def test_only_seeds_of_both_are_paired() -> None:
    assert paired_differences({3: 5.0, 0: 1.0, 7: 9.0}, {0: 0.5, 3: 6.0, 4: 2.0}) == [0.5, -1.0]


def test_factor_by_hand() -> None:
    factors = paired_factors({0: 2.0, 1: 8.0}, {0: 1.0, 1: 1.0, 2: 5.0})
    assert factors == [2.0, 8.0]
    found = geometric(factors)
    assert found is not None
    assert found.mean == pytest.approx(4.0)
    # Logarithms ln 2 and ln 8: standard deviation ln 4 / sqrt 2, so a standard error of ln 4 / 2 = ln 2.
    assert found.high == pytest.approx(4 * 2**12.7062047)
    assert found.low == pytest.approx(4 * 2**-12.7062047)
    assert geometric([0.0, 1.0]) is None
    assert geometric([4.0]) is None


def test_grid() -> None:
    runs = plan("small", list(METHODS), DTYPES, UPDATES, range(2))
    assert len(runs) == len({run.name for run in runs}) == 2 * 2 * (6 * 4 - 1)
    assert not [run for run in runs if run.method == "r2" and run.condition.updates == 1]
    assert all(before.seed <= after.seed for before, after in pairwise(runs)), "stopped, cells have the same seeds"
    assert hours_left(runs[:4], {"small": [100.0, 900.0, 150.0]}, jobs=2) == pytest.approx(4 * 150 / 3600 / 2)


def test_every_cell_is_a_valid_configuration_of_its_own() -> None:
    seen = set()
    for updates, method in product(UPDATES, METHODS):
        run = Run(Condition("small", "bfloat16", updates), method, 5)
        if method == "r2" and updates == 1:
            continue
        config = load_grpo_config(STUDY_CONFIG, run.overrides(128, 64), check_paths=False)
        assert config.updates_per_step == updates
        assert config.policy.generation.vllm.dtype == "bfloat16"
        assert config.policy.precision == "float32"
        seen.add(str(dump_resolved(config)))
    assert len(seen) == 4 * 6 - 1
    with pytest.raises(ConfigurationError, match="got 8, expected a divisor of the 4 responses"):
        Run(Condition("small", "float32", 8), "none", 0).overrides(4, 64)


def test_settings_of_the_user_are_those_of_all_runs(tmp_path: Path) -> None:
    for name in ("grpo.jsonl", "validation_prompts.jsonl"):
        (tmp_path / name).touch()
    tiny = str(REPOSITORY_ROOT / "examples/assets/tiny_qwen3_moe")
    few = ["policy.init=random", "grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=6"]
    config = study_of(tmp_path, tiny, tmp_path, few).config(Run(PLACE, "r3", 3))
    assert (config.grpo.seed, config.policy.train_global_batch_size, config.policy.train_micro_batch_size) == (3, 3, 3)
    assert config.policy.megatron_cfg.routing_replay == "rollout"
    whole = study_of(tmp_path, tiny, tmp_path, few[:1]).config(Run(Condition("small", "float32", 1), "none", 0))
    assert (whole.policy.train_global_batch_size, whole.policy.train_micro_batch_size) == (128, 64)


def test_measures_of_a_run() -> None:
    history = {
        "val/accuracy": [(0, 0.4), (3, 0.7)],
        "train/reward": [(1, 0.1), (2, 0.2), (3, 0.6)],
        "train/gen_kl_error": [(1, 3e-5), (2, 9e-4), (3, 1e-5)],
    }
    assert measures_of(history, MEASURES) == pytest.approx(
        {
            "accuracy at start": 0.4,
            "accuracy": 0.7,
            "reward": 0.3,
            "mismatch, median step": 3e-5,
            "mismatch, worst step": 9e-4,
        }
    )


def result_of(**measures: float) -> Result:
    return Result(10.0, {name.replace("_", " "): value for name, value in measures.items()})


def test_what_is_done_is_not_made_again(tmp_path: Path) -> None:
    done, missing = (Run(PLACE, "none", seed) for seed in (0, 1))
    study = study_of(tmp_path, "unused", tmp_path, [])
    folder = study.runs_folder / done.name
    folder.mkdir(parents=True)
    result_of(accuracy=0.5).write(folder)
    (study.runs_folder / missing.name / "exp_001").mkdir(parents=True)  # begun and killed
    assert read_results(study.runs_folder, [done, missing]) == {done: result_of(accuracy=0.5)}
    # No Ray runs here: a run that was begun would fail.
    make_runs(study, [done], StopSignals(), lambda run, result: pytest.fail(run.name))
    with claimed(study, missing) as is_mine:
        assert is_mine
        make_runs(study, [missing], StopSignals(), lambda run, result: pytest.fail(run.name))
    with claimed(study, missing) as is_mine:
        assert is_mine, "given back"


def test_damaged_result_is_reported(tmp_path: Path) -> None:
    (tmp_path / RESULT_FILE).write_text('{"seconds": 1.0')
    with pytest.raises(DataError, match="remove its folder"):
        read_result(tmp_path)


def made_results() -> Results:
    accuracies = {"none": [0.70, 0.72, 0.74], "r3": [0.71, 0.72, 0.76]}
    results = {
        Run(PLACE, method, seed): result_of(accuracy_at_start=0.4 + seed / 100, accuracy=value)
        for method, values in accuracies.items()
        for seed, value in enumerate(values)
    }
    results[Run(PLACE, "tis", 0)] = result_of(accuracy_at_start=0.41, accuracy=0.9)
    results[Run(PLACE, "tis", 1)] = Result(5.0, {}, diverged="3 updates in a row were skipped")
    return results


def test_tables_pair_seeds_and_show_no_lone_run(tmp_path: Path) -> None:
    text = tables(made_results())
    # Differences 0.01, 0, 0.02: mean 0.01, standard error 0.01 / sqrt(3), times 4.30265.
    assert "| accuracy: difference | 0.0100 (-0.0148 to 0.0348) | - |" in text
    assert "| accuracy | 0.7200 (0.6703 to 0.7697) | 0.7300 (0.6643 to 0.7957) | - |" in text
    assert "| seeds with a lower accuracy | 0 of 3 | 0 of 1 |" in text
    assert "0.9000" not in text, "of one seed"
    assert "Diverged, and in no mean: small-bfloat16-u8-tis-s01." in text
    assert "in 3 of 4 pairs" in start_check(made_results())
    assert draw(made_results(), tmp_path / "study.png")
    assert (tmp_path / "study.png").stat().st_size > 5_000
    lone = {run: result for run, result in made_results().items() if run.seed == 0}
    assert not draw(lone, tmp_path / "none.png")


def test_dry_run_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--cells", "r3,none", "--updates", "8", "--seeds", "24", "--jobs", "2", "--dry-run"]
    assert main([*words, "--output", str(tmp_path / "study")]) == 0
    assert capsys.readouterr().out.startswith("96 runs, 0 of them done; the others take about ")
    assert not (tmp_path / "study").exists()


@pytest.mark.full
def test_tables_of_an_empty_folder_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tables", "--output", str(tmp_path)]) == 2
    assert "no run of `none` is done" in capsys.readouterr().err
