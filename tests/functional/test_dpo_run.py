# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs of direct preference optimization as a user starts them, and what they log."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.functional import dpo_runs, sft_runs
from tests.support.loggers import MetricHistory, read_jsonl

pytestmark = pytest.mark.shared_ray

NUM_TRAIN, NUM_VALIDATION = 40, 11  # neither the batch nor the ranks divide the held-out pairs

LOSS_KEYS = {
    "loss",
    "preference_loss",
    "sft_loss",
    "accuracy",
    "rewards_chosen_mean",
    "rewards_rejected_mean",
    "reward_margin",
    "logprobs_chosen_mean",
    "logprobs_rejected_mean",
}
WAYS: dict[str, dict[str, Any]] = {
    "packed": {"policy__sequence_packing__enabled": True},
    "dynamic": {"policy__dynamic_batching__enabled": True, "policy__dynamic_batching__train_mb_tokens": 256},
    "precomputed": {"dpo__reference_logprobs": "precompute"},
}


def history_of(folder: Path, data: Path, **changes: Any) -> MetricHistory:
    """Everything that one run logs."""
    folder.mkdir()
    # A balancing loss is one of a microbatch: it would differ between the ways to cut a batch.
    overrides = dpo_runs.settings(folder, data, policy__megatron_cfg__moe_aux_loss_coeff=0.0, **changes)
    dpo_runs.run_here(overrides, folder)
    return read_jsonl(sft_runs.only_run_folder(folder) / "metrics.jsonl")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dpo_runs.make_pairs(tmp_path_factory.mktemp("pairs"), NUM_TRAIN, NUM_VALIDATION)


@pytest.fixture(scope="module")
def plain(data: Path, tmp_path_factory: pytest.TempPathFactory) -> MetricHistory:
    return history_of(tmp_path_factory.mktemp("dpo") / "plain", data)


def test_every_metric_is_logged_and_means_what_it_says(plain: MetricHistory) -> None:
    keys = plain.keys()
    assert {f"train/{name}" for name in LOSS_KEYS | {"grad_norm", "lr", "num_valid_pairs", "num_valid_tokens"}} <= keys
    assert {key for key in keys if key.startswith("val/")} == {f"val/{name}" for name in LOSS_KEYS}
    assert {"train/moe/cv_mean", "timing/train/seconds", "timing/reference_logprobs/seconds"} <= keys
    assert [step for step, _ in plain["train/loss"]] == [1, 2, 3, 4]
    assert [step for step, _ in plain["val/loss"]] == [0, 2, 4]
    assert {value for _, value in plain["train/num_valid_pairs"]} == {8.0}
    # The model begins as its own reference.
    assert plain["val/loss"][0][1] == pytest.approx(math.log(2), abs=1e-6)
    assert plain["train/loss"][0][1] == pytest.approx(math.log(2), abs=1e-5)
    assert plain["val/loss"][-1][1] < math.log(2)
    for split in ("train", "val"):
        columns = {name: [value for _, value in plain[f"{split}/{name}"]] for name in LOSS_KEYS}
        both = zip(columns["rewards_chosen_mean"], columns["rewards_rejected_mean"], strict=True)
        assert columns["reward_margin"] == pytest.approx([chosen - rejected for chosen, rejected in both], abs=1e-6)
        assert columns["loss"] == pytest.approx(columns["preference_loss"])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["packed", "dynamic", "precomputed"])
def test_every_way_to_batch_and_to_measure_trains_alike(
    plain: MetricHistory, data: Path, tmp_path: Path, way: str
) -> None:
    found = history_of(tmp_path / "run", data, **WAYS[way])
    for name in ("loss", "preference_loss", "sft_loss", "rewards_chosen_mean", "logprobs_rejected_mean"):
        for split in ("train", "val"):
            wanted = [value for _, value in plain[f"{split}/{name}"]]
            assert [value for _, value in found[f"{split}/{name}"]] == pytest.approx(wanted, rel=1e-4, abs=1e-4), name
    assert ("timing/reference_logprobs/seconds" in found) == (way != "precomputed")


@pytest.mark.slow
def test_a_resumed_run_measures_its_reference_again_and_goes_on_to_the_last_bit(data: Path, tmp_path: Path) -> None:
    """The checkpoint's weights are no longer the reference's: those are measured before it is loaded."""
    overrides = dpo_runs.settings(
        tmp_path,
        data,
        dpo__reference_logprobs="precompute",
        dpo__max_num_epochs=2,
        dpo__max_num_steps=6,  # the last of them is the second epoch's first
        checkpointing__checkpoint_dir=tmp_path / "checkpoints",
        checkpointing__save_period=4,
    )

    def numbers_of_a_run() -> dict[str, Any]:
        dpo_runs.run_here(overrides, tmp_path)
        history = read_jsonl(sft_runs.only_run_folder(tmp_path) / "metrics.jsonl")
        return {key: values for key, values in history.items() if not key.startswith("timing/")}

    whole = numbers_of_a_run()
    for name in ("step_6", "final"):
        shutil.rmtree(tmp_path / "checkpoints" / name)
    assert numbers_of_a_run() == whole
    assert (tmp_path / "checkpoints" / "final").is_dir()
