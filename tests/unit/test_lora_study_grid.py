# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Grid, configurations and tables of the study of adapters, against values worked out by hand."""

from itertools import pairwise
from pathlib import Path

import pytest

from examples.lora_study.__main__ import main
from examples.lora_study.configuration import study_of
from examples.lora_study.grid import METHODS, RATE_SEEDS, Run, choice_of_rates, comparison
from examples.lora_study.measures import MEASURES, Results
from examples.lora_study.tables import compared, draw, tables
from examples.studies.results import Result, measures_of
from tests.conftest import REPOSITORY_ROOT

NAMES = list(METHODS)


def run_of(method: str, seed: int) -> Run:
    return Run(method, METHODS[method].rate, seed)


def test_rates_are_chosen_with_seeds_that_the_comparison_has_not() -> None:
    compared_runs, of_rates = comparison(NAMES, range(12)), choice_of_rates(NAMES, RATE_SEEDS)
    assert len({run.name for run in [*compared_runs, *of_rates]}) == 3 * 12 + 3 * 3 * 3
    assert not {run.seed for run in compared_runs} & {run.seed for run in of_rates}
    assert all(before.seed <= after.seed for before, after in pairwise(compared_runs)), "stopped, seeds are the same"
    assert all(method.rate in method.rates for method in METHODS.values())


def test_settings_of_each_method(tmp_path: Path) -> None:
    for name in ("grpo.jsonl", "validation_prompts.jsonl"):
        (tmp_path / name).write_text("{}\n")
    model = str(REPOSITORY_ROOT / "examples/assets/tiny_qwen3_moe")
    study = study_of(tmp_path, tmp_path, model, ["policy.init=random"])
    configs = {name: study.config(Run(name, 2e-4, 7)) for name in NAMES}
    assert {name: config.policy.lora is not None for name, config in configs.items()} == {
        "full": False,
        "frozen_router": False,
        "lora": True,
    }
    assert [config.policy.megatron_cfg.freeze_moe_router for config in configs.values()] == [False, True, False]
    for config in configs.values():
        assert (config.grpo.seed, config.policy.megatron_cfg.optimizer.lr) == (7, 2e-4)
        assert config.grpo.max_num_steps is not None
        every = config.policy.megatron_cfg.routing_measurements.every_n_steps
        assert every is not None
        assert config.grpo.max_num_steps % every == 0, "drift is measured in the last step"


def made_results() -> Results:
    """Return 12 seeds of which the adapters' accuracies are 0.79, 0.80, 0.81, ... against 0.8, and a tuning run."""
    results: Results = {}
    for seed in range(12):
        noise = 0.01 * (seed % 3 - 1)
        results[run_of("full", seed)] = Result(10.0, {"accuracy": 0.8, "mismatch": 1e-9})
        results[run_of("lora", seed)] = Result(10.0, {"accuracy": 0.8 + noise, "mismatch": 3e-9})
        results[run_of("frozen_router", seed)] = Result(10.0, {"accuracy": 0.7 + noise})
    results[run_of("lora", RATE_SEEDS[0])] = Result(10.0, {"accuracy": 0.1})
    results[Run("lora", METHODS["lora"].rates[-1], RATE_SEEDS[0])] = Result(5.0, {}, diverged="not a number")
    return results


def test_differences_are_paired_and_leave_out_the_seeds_of_rates(tmp_path: Path) -> None:
    text = tables(made_results())
    # Deviation 0.01 * sqrt(8 / 11), over sqrt(12), times 2.200985 of 11 degrees of freedom: 0.00542.
    assert "- lora: accuracy no difference seen, +0.000 (-0.005 to +0.005), n 12." in text
    assert "- frozen_router: accuracy lower, -0.100 (-0.105 to -0.095), n 12." in text
    assert "| mismatch: factor | - | 3.00 (3.00 to 3.00), n 12 |" in text
    assert "Diverged, and in no mean: lora-lr" in text
    draw(made_results(), tmp_path / "study.png")
    assert (tmp_path / "study.png").stat().st_size > 5_000


def test_nothing_is_claimed_of_eleven_seeds() -> None:
    results = made_results()
    del results[run_of("full", 3)]
    assert "accuracy no difference seen" not in tables(results)
    found = compared(results, "lora", "accuracy")
    assert found is not None
    assert found.count == 11


def test_measures_of_a_run() -> None:
    history = {
        "val/accuracy": [(30, 0.7)],
        "train/moe/routing_drift/rows_differing_from_reference": [(5, 0.1), (30, 0.2)],
        "train/moe/routing_drift/rows_differing_of_step": [(5, 0.01), (30, 0.03)],
    }
    assert measures_of(history, MEASURES) == pytest.approx(
        {"accuracy": 0.7, "routing drift from the base, last step": 0.2, "routing drift of a step": 0.02}
    )


def test_dry_run_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--methods", "lora,full", "--dry-run", "--output", str(tmp_path / "study")]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("24 runs, 0 of them done; the others take about ")
    assert main([*words, "--part", "rates"]) == 0
    assert capsys.readouterr().out.startswith("18 runs, 0 of them done")
    assert not (tmp_path / "study").exists()
    with pytest.raises(SystemExit):
        main(["run", "--methods", "dora"])
    assert "got dora, expected some of full,frozen_router,lora" in capsys.readouterr().err
