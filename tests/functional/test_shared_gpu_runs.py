# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole runs, the tests of other files too, with an engine on the trainer's GPU that keeps vLLM's rules of sleep.

The engine is this project's own for vLLM, in front of a stand-in with those rules and a model of transformers. It takes
the trainer's CPUs for GPUs that both use, so that the account of a shared GPU is kept as well.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl_moe.generation.registry import EngineSetup
from nemo_rl_moe.generation.vllm import engine as vllm_engine
from nemo_rl_moe.generation.vllm import releases
from nemo_rl_moe.models.policy import lm_policy
from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME, read_metrics
from tests.functional import grpo_runs, sft_runs, shared_ray
from tests.functional.test_custom_parts import test_own_parts_take_part_in_a_run
from tests.functional.test_engine_sleep import STAND_IN
from tests.functional.test_turn_credit_run import test_a_run_gives_credit_by_turn
from tests.functional.test_turns import test_trajectories_of_two_turns_are_trained_on

pytestmark = pytest.mark.slow

__all__ = [
    "test_a_run_gives_credit_by_turn",
    "test_own_parts_take_part_in_a_run",
    "test_trajectories_of_two_turns_are_trained_on",
]


@pytest.fixture(scope="module", autouse=True)
def ray_with_the_stand_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Ray whose processes import the stand-in; the file of what engines do."""
    log = tmp_path_factory.mktemp("engines") / "events.txt"
    shared_ray.end_shared_ray()
    with pytest.MonkeyPatch.context() as patch:
        path = [str(STAND_IN), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        patch.setenv("VLLM_STAND_IN_LOG", str(log))
        shared_ray.start_shared_ray()
        yield log
    shared_ray.end_shared_ray()


@pytest.fixture(autouse=True)
def events(ray_with_the_stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Runs of this test have an engine on the trainer's GPUs, which is asked for nothing that vLLM would not do."""
    make, settings = vllm_engine.make_vllm_engine, grpo_runs.settings

    def on_gpus(setup: EngineSetup) -> Any:
        cluster = setup.config.cluster.model_copy(update={"gpus_per_node": 1})
        machine: Any = SimpleNamespace(placement_group=setup.cluster.placement_group, config=cluster)
        return make(replace(setup, config=setup.config.model_copy(update={"cluster": cluster}), cluster=machine))

    monkeypatch.setattr(vllm_engine, "make_vllm_engine", on_gpus)
    monkeypatch.setattr(lm_policy, "engines_share_gpus", lambda config: True)
    monkeypatch.setattr(releases, "check_installation", lambda *, on_gpus: None)
    monkeypatch.setattr(releases, "check_model", lambda *args, **kwargs: None)
    monkeypatch.setattr(
        grpo_runs, "settings", lambda *args, **kw: [*settings(*args, **kw), "policy.generation.backend=vllm"]
    )
    ray_with_the_stand_in.write_text("")
    yield ray_with_the_stand_in
    lines = ray_with_the_stand_in.read_text().splitlines()
    assert lines.count("start") >= 1, "no engine was there"
    assert [line for line in lines if line.startswith(("sleep:", "wake:"))] == [], "asked for what it does not do"


def answers_of_each_load(events: Path) -> list[int]:
    """Return how many requests were answered with each weights."""
    found: list[int] = []
    for line in events.read_text().splitlines():
        if line.startswith("load "):
            found.append(0)
        elif line.startswith("answer "):
            found[-1] += int(line.split()[1])
    return found


def finished(folder: Path, data: Path, **changes: Any) -> list[dict[str, float]]:
    """Run to a good end; return the metrics of the steps."""
    grpo_runs.run_here(grpo_runs.settings(folder, data, **sft_runs.only_jsonl(), **changes), folder)
    records = read_metrics(sft_runs.only_run_folder(folder) / METRICS_FILE_NAME)
    return [dict(record.metrics) for record in records if "train/loss" in record.metrics]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return grpo_runs.make_prompts(tmp_path_factory.mktemp("data"), 40)


@pytest.mark.parametrize(
    "changes",
    [
        {"grpo__val_at_start": True, "grpo__val_period": 1},
        {"grpo__use_dynamic_sampling": True, "grpo__dynamic_sampling_max_groups": 12},
        {"policy__offload_optimizer_for_generation": True, "policy__offload_optimizer_for_logprob": True},
        {"policy__train_global_batch_size": 8},
        {"cluster__cpu_workers_per_node": 2, "policy__megatron_cfg__expert_model_parallel_size": 2},
    ],
    ids=["validation", "dynamic sampling", "state on the host", "two updates a step", "two ranks"],
)
def test_engine_and_trainer_agree_about_every_token(
    changes: dict[str, Any], events: Path, tmp_path: Path, data: Path
) -> None:
    steps = finished(tmp_path, data, **changes)
    assert len(steps) == 3
    for metrics in steps:
        assert abs(metrics["train/token_mult_prob_error"] - 1) < 1e-5
        assert metrics["train/refit/checks_failed"] == 0
    answered = answers_of_each_load(events)
    assert all(answered[:-1]), "weights that nobody has used"


def test_a_resumed_run_loads_its_state_while_engines_sleep(events: Path, tmp_path: Path, data: Path) -> None:
    saved = {
        "checkpointing__checkpoint_dir": tmp_path / "checkpoints",
        "policy__offload_optimizer_for_generation": True,
        "policy__megatron_cfg__scheduler__lr_decay_iters": 3,
    }
    assert len(finished(tmp_path, data, grpo__max_num_steps=1, **saved)) == 1
    events.write_text("")
    steps = finished(tmp_path, data, grpo__max_num_steps=3, **saved)  # with those of the first run
    assert [metrics["train/token_mult_prob_error"] for metrics in steps] == pytest.approx([1.0] * 3, abs=1e-5)
    lines = events.read_text().splitlines()
    assert lines[:2] == ["start", "sleep 2"]
