# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Grid, configurations, control and tables of the study of distillation, against values worked out by hand."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples.distillation_study.__main__ import MOST_SEEDS, main
from examples.distillation_study.configuration import study_of
from examples.distillation_study.grid import METHODS, SHUFFLED, TEACHER, Run, comparison, tuning
from examples.distillation_study.measures import MEAN_ACCURACY, MEASURES, Results, steps_to_level
from examples.distillation_study.tables import draw, tables
from examples.distillation_study.teachers import shuffle_tokens
from examples.studies.results import Result, measures_of
from nemo_rl_moe.config.schema_distillation import DistillationMasterConfig
from tests.conftest import REPOSITORY_ROOT
from tests.support.golden_runs import make_moe_teacher

MODEL = REPOSITORY_ROOT / "examples/assets/tiny_qwen3_moe"


def test_methods_differ_in_what_they_learn_from(tmp_path: Path) -> None:
    for name in ("grpo.jsonl", "validation_prompts.jsonl"):
        (tmp_path / name).write_text("{}\n")
    teachers = {}
    for name in (TEACHER, SHUFFLED):
        teachers[name] = tmp_path / name
        teachers[name].mkdir()
        (teachers[name] / "config.json").write_text("{}\n")
    study = study_of(tmp_path, tmp_path, str(MODEL), teachers, ["policy.init=random"])
    configs = {run.method: study.config(run) for run in comparison(list(METHODS), [7])}
    assert not isinstance(configs["grpo"], DistillationMasterConfig)
    for name, kind in (("distillation", TEACHER), ("shuffled", SHUFFLED)):
        config = configs[name]
        assert isinstance(config, DistillationMasterConfig)
        assert config.distillation.teachers["teacher"].model_name == str(teachers[kind])
        assert config.distillation.policy_gradient_weight == 0
    baseline = configs["grpo"]
    for config in configs.values():
        assert (config.grpo, config.data) == (baseline.grpo, baseline.data)
        assert config.grpo.seed == 7
        own_rate = {"lr": baseline.policy.megatron_cfg.optimizer.lr}
        assert (
            config.policy.megatron_cfg.optimizer.model_copy(update=own_rate) == baseline.policy.megatron_cfg.optimizer
        )
    for run in tuning():
        assert run.learning_rate is not None
        config = study.config(run)
        assert config.policy.megatron_cfg.optimizer.lr == float(run.learning_rate)
        assert config.grpo.seed == run.seed


def test_a_shuffled_teacher_has_the_same_probabilities_of_other_tokens(tmp_path: Path) -> None:
    teacher = make_moe_teacher(tmp_path / "teacher", MODEL)
    shuffle_tokens(teacher, tmp_path / "shuffled")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("teacher", "shuffled"))
    changed = [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
    assert changed == ["lm_head.weight"]
    rows, shuffled = before["lm_head.weight"], after["lm_head.weight"]
    assert torch.equal(rows.sum(1).sort().values, shuffled.sum(1).sort().values)
    assert (rows == shuffled).all(1).sum() < 5
    assert (tmp_path / "shuffled/tokenizer.json").is_file()


def test_measures_of_a_run() -> None:
    history = {
        "val/accuracy": [(step, step / 100) for step in range(0, 31, 5)],  # the level is never reached
        "train/teacher_kl": [(1, 0.9), (2, 0.5), (3, 0.1)],
    }
    assert measures_of(history, MEASURES) == pytest.approx(
        {
            "accuracy": 0.3,
            "mean accuracy over the run": (0.05 + 0.1 + 0.15 + 0.2 + 0.25 + 0.3) / 6,
            "steps to 0.80": 30.0,
            **{f"accuracy after {step} steps": step / 100 for step in (0, 5, 10, 20, 30)},
            "divergence, first step": 0.9,
            "divergence, last step": 0.1,
        }
    )


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ([0.5, 0.7, 0.9, 0.9], 7.5),
        ([0.5, 0.8, 0.7, 0.9], 5.0),
        ([0.5, 0.85, 0.7, 0.9], 5 * 0.3 / 0.35),
        ([0.5, 0.6, 0.7, 0.79], 15.0),
    ],
)
def test_steps_to_the_level_are_between_validations(values: list[float], steps: float) -> None:
    assert steps_to_level(values) == pytest.approx(steps)


def test_learning_rates_stand_apart_from_the_comparison() -> None:
    assert not {run.seed for run in tuning()} & {run.seed for run in comparison(list(METHODS), range(MOST_SEEDS))}
    results: Results = {
        run: Result(10.0, {MEAN_ACCURACY: 0.9 if run.learning_rate == "1.0e-4" else 0.1}) for run in tuning()
    }
    text = tables(results)
    assert "| `grpo` | 0.100 0.100 | 0.900 0.900 | 0.100 0.100 | 0.100 0.100 | 0.100 0.100 |" in text
    assert f"| {MEAN_ACCURACY} | - | - | - |" in text


def test_differences_are_paired_by_seed(tmp_path: Path) -> None:
    results: Results = {}
    for seed in range(3):
        for method, gain in (("grpo", 0.0), ("distillation", 0.2), ("shuffled", -0.1)):
            accuracy = {f"accuracy after {step} steps": 0.4 + 0.1 * seed + gain for step in (0, 5, 10, 20, 30)}
            results[Run(method, seed)] = Result(10.0, accuracy)
    results[Run("shuffled", 3)] = Result(5.0, {}, diverged="not a number")
    text = tables(results)
    assert "| accuracy after 10 steps | +0.200 (+0.200 to +0.200), n 3 | -0.100 (-0.100 to -0.100), n 3 |" in text
    assert "Diverged, and in no mean: shuffled-s03." in text
    draw(results, tmp_path / "study.png")
    assert (tmp_path / "study.png").stat().st_size > 5_000


def test_dry_run_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--methods", "grpo,distillation", "--dry-run", "--output", str(tmp_path / "study")]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("6 runs, 0 of them done; the others take about ")
    assert not (tmp_path / "study").exists()
