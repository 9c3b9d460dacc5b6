# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`nemo-rl-moe config` finds what a run would find missing before it starts: files, models, modules, functions."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from nemo_rl_moe import cli
from tests.unit.config.conftest import about_keys

TINY = Path(cli.__file__).resolve().parents[1] / "examples/assets/tiny_qwen3_moe_tools"
RUN = f"""
defaults: grpo.yaml
policy: {{model_name: {TINY}, init: random}}
env: {{reward: {{kind: callable, function: "first_day_reward:score"}}}}
data:
  train: {{path: prompts.jsonl}}
  validation: null
cluster: {{gpus_per_node: 0}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "first_day_reward.py").write_text("def score(item):\n    return 1.0\n")
    (tmp_path / "my_run.yaml").write_text(RUN)
    yield tmp_path
    sys.modules.pop("first_day_reward", None)


def test_a_whole_configuration_is_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--config", "my_run.yaml"]) == 0
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["env"]["reward"]["function"] == "first_day_reward:score"
    assert printed.err == ""


MISSING = {
    "data.train.path=prompt.jsonl": "prompt.jsonl not found in the working folder ",
    "policy.model_name=./nothing": "nothing not found in the working folder ",
    "env.reward.function=first_day_reward:scor": "first_day_reward:scor: first_day_reward has no scor; did you mean"
    " score?",
    "env.reward.function=no_such_day:score": "no_such_day:score: there is no module ",
    "logger.backends=[no_such_day:Logger]": "no_such_day:Logger: there is no module ",
    "grpo.adv_estimator.name=no_such_day:best": "no_such_day:best: there is no module ",
    "loss_fn.objective=no_such_day:clip": "no_such_day:clip: there is no module no_such_day",
}


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        *about_keys(MISSING),
        (
            "env.driver={kind: tools, tools: [no_such_day:tool]}",
            "env.driver.tools: no_such_day:tool: there is no module no_such_day",
        ),
        (
            "env.driver={kind: tools, tools: [calculatr]}",
            "env.driver.tools: got 'calculatr', expected package.module:function, or one of ",
        ),
    ],
)
def test_what_is_missing_ends_it_with_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str], override: str, problem: str
) -> None:
    assert cli.main(["config", "--config", "my_run.yaml", override]) == 2
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["cluster"]["gpus_per_node"] == 0, "the configuration is printed all the same"
    (line,) = printed.err.splitlines()
    assert line.startswith(f"error: {problem}")


def test_all_that_is_missing_is_named_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data.train.path=no.jsonl", "env.reward.function=no_such_day:score", "logger.backends=[no_such_day:L]"]
    assert cli.main(["config", "--config", "my_run.yaml", *words]) == 2
    keys = [line.split(":")[1].strip() for line in capsys.readouterr().err.splitlines()]
    assert keys == ["data.train.path", "logger.backends", "env.reward.function"]


def test_the_layout_of_a_local_model_is_checked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also for GPUs that this machine lacks, and for roles."""
    stages = "megatron_cfg.pipeline_model_parallel_size"
    batches = ["policy.train_global_batch_size=48", "grpo.num_prompts_per_step=6", "policy.train_micro_batch_size=1"]
    three = ["cluster.cpu_workers_per_node=3", f"policy.{stages}=3", *batches]
    gpus = ["cluster.gpus_per_node=1", "policy.megatron_cfg.model_overrides={attention_backend: flash}"]
    assert cli.main(["config", "--config", "my_run.yaml", *gpus]) == 0
    assert capsys.readouterr().err == ""
    assert cli.main(["config", "--config", "my_run.yaml", *three]) == 2
    assert capsys.readouterr().err.startswith(f"error: policy.{stages}: got 3 (x 1 virtual stages), which does not ")
    teacher = f"distillation.teachers.teacher.{stages}=3"
    words = ["distillation_tiny_moe.yaml", teacher, "cluster.roles.teacher.cpu_workers_per_node=3"]
    models = [f"policy.model_name={TINY}", f"distillation.teachers.teacher.model_name={TINY}"]
    assert cli.main(["config", "--config", *words, *models]) == 2
    assert f"error: distillation.teachers.teacher.{stages}: got 3" in capsys.readouterr().err


def test_a_teacher_s_missing_adapter_is_named_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = "distillation.teachers.teacher"
    words = [f"{key}.model_name={TINY}", f"{key}.adapter=no/such"]
    assert cli.main(["config", "--config", "distillation_tiny_moe.yaml", *words]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "no/such" in line]
    assert len(lines) == 1
    assert lines[0].startswith("error: distillation.teachers.teacher.adapter: no/such not found in the working folder ")
