# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs whose rollouts are asynchronous: without staleness the synchronous run, with it one that can be repeated."""

from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.launch.rollouts import SCHEDULE_FILE
from nemo_rl_moe.rollouts.dispatch.schedule import read_schedule
from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME, read_metrics
from tests.functional import grpo_runs, sft_runs

pytestmark = pytest.mark.shared_ray

Metrics = list[tuple[int, dict[str, float]]]
ASYNCHRONOUS = {"grpo__rollouts__mode": "asynchronous"}
COPY = {"policy__generation__backend": "tests.support.transformers_engine:make_streaming_engine"}


def trained(folder: Path, data: Path, **changes: Any) -> Path:
    """Return the folder of a run of three steps that has ended well, with its final weights."""
    fixed: dict[str, Any] = {
        "checkpointing__checkpoint_dir": folder / "checkpoints",
        "checkpointing__save_period": 0,
        "policy__megatron_cfg__optimizer__lr": 1e-3,
        "env__reward__kind": "callable",
        "env__reward__function": "tests.functional.grpo_runs:share_of_digits",
    }
    settings = grpo_runs.settings(folder, data, **(fixed | sft_runs.only_jsonl() | changes))
    grpo_runs.run_here(settings, folder)
    return sft_runs.only_run_folder(folder)


def metrics_of(run_folder: Path) -> Metrics:
    """Return the metrics of each step that do not depend on time, nor on who tells them."""
    left_out = ("timing/", "train/staleness/", "train/rollouts/")
    return [
        (record.step, {name: value for name, value in record.metrics.items() if not name.startswith(left_out)})
        for record in read_metrics(run_folder / METRICS_FILE_NAME)
    ]


def weights_of(run_folder: Path) -> dict[str, bytes]:
    """Return the files of the final weights."""
    final = run_folder.parents[1] / "checkpoints/final"
    return {path.name: path.read_bytes() for path in final.glob("*.safetensors")}


def series(run_folder: Path, name: str) -> list[float]:
    """Return a metric of each step that has it."""
    records = read_metrics(run_folder / METRICS_FILE_NAME)
    return [record.metrics[name] for record in records if name in record.metrics]


@pytest.mark.full
def test_without_staleness_it_is_the_synchronous_run_to_the_bit(tmp_path: Path) -> None:
    data = grpo_runs.make_prompts(tmp_path / "data", 12)
    several_turns = {
        "env__driver__kind": "function",
        "env__driver__function": "tests.functional.grpo_runs:ask_twice",
        "policy__train_global_batch_size": 8,
    }
    synchronous = trained(tmp_path / "synchronous", data, **several_turns)
    found = trained(tmp_path / "asynchronous", data, **several_turns, **ASYNCHRONOUS, grpo__rollouts__max_staleness=0)
    expected = metrics_of(synchronous)
    assert [step for step, _ in expected] == [0, 1, 2, 3]
    assert metrics_of(found) == expected
    assert weights_of(found) == weights_of(synchronous) != {}
    assert series(found, "train/staleness/max") == [0.0, 0.0, 0.0]


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run whose groups run ahead of training."""
    folder = tmp_path_factory.mktemp("ahead")
    data = grpo_runs.make_prompts(folder / "data", 12)
    return trained(folder / "ahead", data, **ASYNCHRONOUS, **COPY, loss_fn__importance_sampling_correction="truncated")


def test_a_run_ahead_trains(ahead: Path) -> None:
    steps = read_schedule(ahead / SCHEDULE_FILE)
    assert [step.version for step in steps] == [0, 1, 2]
    lags = [step.version - group.version for step in steps for group in step.groups]
    assert set(lags) == {0, 1}, "no group is older, and some groups ran ahead"
    assert series(ahead, "train/staleness/max") == [0.0, 1.0, 1.0]


@pytest.mark.slow
def test_the_schedule_of_a_run_ahead_repeats_it(ahead: Path, tmp_path: Path) -> None:
    data = ahead.parents[2] / "data"  # a schedule names the records of its files
    steps = read_schedule(ahead / SCHEDULE_FILE)
    repeated = [
        trained(
            tmp_path / f"repeated_{number}",
            data,
            **ASYNCHRONOUS,
            grpo__rollouts__replay_schedule=ahead / SCHEDULE_FILE,
            loss_fn__importance_sampling_correction="truncated",
        )
        for number in range(2)
    ]
    first, second = repeated
    assert [step.groups for step in read_schedule(first / SCHEDULE_FILE)] != []
    assert [
        [(group.position, group.version) for group in step.groups] for step in read_schedule(first / SCHEDULE_FILE)
    ] == [[(group.position, group.version) for group in step.groups] for step in steps]
    assert metrics_of(first) == metrics_of(second)
    assert weights_of(first) == weights_of(second) != {}


@pytest.mark.slow
def test_a_run_that_goes_on_trains_on_each_prompt_once(tmp_path: Path) -> None:
    """A13: what was consumed is kept by prompt; finished groups come back, running ones are drawn again."""
    data = grpo_runs.make_prompts(tmp_path / "data", 16)
    ahead = ASYNCHRONOUS | COPY | {"grpo__rollouts__order": "ready_first", "checkpointing__save_period": 1}
    first = trained(tmp_path, data, **ahead, grpo__max_num_steps=2)
    second = trained(tmp_path, data, **ahead, grpo__max_num_steps=4)
    assert second == first, "the run goes on in its folder"
    steps = read_schedule(first / SCHEDULE_FILE)
    assert [step.version for step in steps] == [0, 1, 2, 3]
    positions = [group.position for step in steps for group in step.groups]
    assert sorted(positions) == list(range(16))
    assert max(series(first, "train/staleness/max")) <= 1.0


DYNAMIC = {
    "grpo__use_dynamic_sampling": True,
    "grpo__dynamic_sampling_max_groups": 12,
    "grpo__max_num_epochs": 6,
    "env__reward__function": "tests.support.golden_user_code:has_an_even_digit",
}


@pytest.mark.slow
def test_dynamic_sampling_replaces_groups_that_run_ahead(tmp_path: Path) -> None:
    data = grpo_runs.make_prompts(tmp_path / "data", 24)
    corrected = {"loss_fn__importance_sampling_correction": "truncated"}
    run_folder = trained(tmp_path / "ahead", data, **ASYNCHRONOUS, **COPY, **DYNAMIC, **corrected)
    replaced = series(run_folder, "train/rollouts/num_cancelled/uninformative")
    batches = series(run_folder, "train/dynamic_sampling/num_gen_batches")
    assert sum(replaced) > 0
    assert sum(batches) == pytest.approx(len(batches) + sum(replaced) / 4)
    steps = read_schedule(run_folder / SCHEDULE_FILE)
    positions = [group.position for step in steps for group in step.groups]
    assert len(positions) == len({*positions}) == 3 * 4
    assert max(positions) >= 3 * 4, "other prompts took the places of those that were replaced"


@pytest.mark.full
def test_with_dynamic_sampling_a_run_in_order_goes_on_to_the_bit(tmp_path: Path) -> None:
    data = grpo_runs.make_prompts(tmp_path / "data", 24)
    in_order = {**ASYNCHRONOUS, "grpo__rollouts__max_staleness": 0, **DYNAMIC, "grpo__max_num_steps": 4}
    whole = trained(tmp_path / "whole", data, **in_order)
    first = trained(
        tmp_path / "parts", data, **(in_order | {"grpo__max_num_steps": 2, "checkpointing__save_period": 2})
    )
    assert [step for step, _ in metrics_of(first)] == [0, 1, 2]
    second = trained(tmp_path / "parts", data, **in_order)
    assert weights_of(second) == weights_of(whole) != {}
    assert dict(metrics_of(second))[4] == dict(metrics_of(whole))[4]
