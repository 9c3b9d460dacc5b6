# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole runs in every layout and every way to batch: what they log and the weights they write are one worker's.

The tests of the trainer compare layouts more closely; here data, sharding, Ray, loggers and weight files take part.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest
import safetensors.torch
import torch

from nemo_rl_moe.runs.folder.metrics import StepRecord, read_metrics
from tests.functional import sft_runs
from tests.support.tiny_model import layout

pytestmark = [pytest.mark.shared_ray, pytest.mark.full]

NUM_STEPS = 3
NUM_VALIDATION = 5

# Relative, but for weights. Largest seen: 1.1e-7, 5.4e-7, 2.6e-7, and 1.4e-6 where weights move by 1e-2.
SAME_LOSS = 1e-6
SAME_GRAD_NORM = 3e-6
SAME_MOE_METRIC = 2e-6
SAME_WEIGHTS = 1e-5

# A run's speed and how it was cut are its own; so is the load of the ranks that its experts are spread over.
OVERLOAD = ("train/moe/avg_overload", "train/moe/max_overload", "train/moe/max_cum_overload")
NOT_COMPARED = ("timing/", "train/num_microbatches", *OVERLOAD)

ZERO_1 = {"distributed_data_parallel_config__use_distributed_optimizer": True}
RECOMPUTE = {"activation_checkpointing": "full"}
RECOMPUTE_MOE = {"activation_checkpointing": "moe"}
DENSE_STAGE = "dense_stage"

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2_zero1_full_recompute": (2, ZERO_1 | RECOMPUTE),
    "ep2_zero1_moe_recompute": (2, layout(ep=2) | ZERO_1 | RECOMPUTE_MOE),
    "pp2": (2, layout(pp=2)),
    "pp2_vpp2": (2, layout(pp=2, vpp=2)),
    "pp2_ep2_zero1": (4, layout(pp=2, ep=2) | ZERO_1),
    "tp2_moe_recompute": (2, layout(tp=2) | RECOMPUTE_MOE),
    "tp2_ep2": (2, layout(tp=2, ep=2)),
}


@dataclass(frozen=True)
class Run:
    """What one run left behind.

    Attributes:
        steps: The lines of `metrics.jsonl`.
        weights: The final weights by their Hugging Face names.
        expert_load: Assignments by (step, layer, expert); empty where nothing was written.
    """

    steps: list[StepRecord]
    weights: dict[str, torch.Tensor]
    expert_load: dict[tuple[int, int, int], int]

    def values(self, key: str) -> list[float]:
        """A metric's value at each step that has it."""
        return [record.metrics[key] for record in self.steps if key in record.metrics]

    def metric_names(self) -> set[str]:
        """Every metric."""
        return {key for record in self.steps for key in record.metrics}


class Runs:
    """Starts runs that differ in a few settings; each one is made once."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._data = sft_runs.make_additions(folder / "data", NUM_STEPS * 8, NUM_VALIDATION)
        self._models = {
            "moe": sft_runs.MODEL,
            # With two pipeline stages the first one holds no MoE layer.
            DENSE_STAGE: sft_runs.make_model_folder(folder / "model", mlp_only_layers=[0, 1]),
        }
        self._made: dict[str, Run] = {}

    def __call__(self, num_workers: int = 1, model: str = "moe", **changes: Any) -> Run:
        """Makes a run.

        Args:
            num_workers: Ranks.
            model: Which model.
            changes: Keys below `policy.megatron_cfg`, or complete ones; two underscores for a dot.
        """
        name = f"{num_workers} {model} {sorted(changes.items())}"
        if name not in self._made:
            self._made[name] = self._run(self._folder / f"run_{len(self._made)}", num_workers, model, changes)
        return self._made[name]

    def _run(self, folder: Path, num_workers: int, model: str, changes: Mapping[str, Any]) -> Run:
        chosen = {
            "sft__max_num_steps": NUM_STEPS,
            "sft__val_period": 0,
            "policy__train_global_batch_size": 8,
            "policy__train_micro_batch_size": 1,
            "cluster__cpu_workers_per_node": num_workers,
            "moe_aux_loss_coeff": 0.05,
            # Keeps the update from turning rounding noise of tiny gradients into whole steps.
            "optimizer__adam_eps": 1e-5,
            "scheduler__lr_warmup_iters": 0,
            **sft_runs.only_jsonl(),
            **changes,
        }
        sections = ("sft__", "policy__", "cluster__", "logger__")
        keys = {
            name if name.startswith(sections) else f"policy__megatron_cfg__{name}": value
            for name, value in chosen.items()
        }
        sft_runs.run_here(sft_runs.settings(folder, self._data, self._models[model], **keys), self._folder)
        return read_run(sft_runs.only_run_folder(folder))


def read_run(run_folder: Path) -> Run:
    load = run_folder / "expert_load.parquet"
    rows = pyarrow.dataset.dataset(load).to_table().to_pylist() if load.exists() else []
    weights: dict[str, torch.Tensor] = {}
    for path in (run_folder / "checkpoints" / "final").glob("*.safetensors"):
        weights |= safetensors.torch.load_file(path)
    return Run(
        read_metrics(run_folder / "metrics.jsonl"),
        weights,
        {(row["step"], row["layer"], row["expert"]): row["count"] for row in rows},
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("layouts"))


def assert_same_metrics(run: Run, reference: Run) -> None:
    """Compares every metric of every step."""
    assert [record.step for record in run.steps] == [record.step for record in reference.steps]
    for record, expected in zip(run.steps, reference.steps, strict=True):
        compared = {key: value for key, value in expected.metrics.items() if not key.startswith(NOT_COMPARED)}
        found = {key: value for key, value in record.metrics.items() if not key.startswith(NOT_COMPARED)}
        assert found.keys() == compared.keys()
        for key, value in compared.items():
            kind = "moe" if "moe" in key else key.rpartition("/")[2]
            tolerance = {"moe": SAME_MOE_METRIC, "grad_norm": SAME_GRAD_NORM, "loss": SAME_LOSS}.get(kind, 1e-9)
            assert found[key] == pytest.approx(value, rel=tolerance, abs=1e-9), f"step {record.step}: {key}"


def assert_same_weights(run: Run, reference: Run) -> None:
    """Compares the files that the runs wrote."""
    assert run.weights.keys() == reference.weights.keys()
    for name, weight in reference.weights.items():
        assert run.weights[name].shape == weight.shape
        assert (run.weights[name] - weight).abs().max().item() <= SAME_WEIGHTS, name


def test_reference_run(runs: Runs) -> None:
    reference = runs()
    assert [record.step for record in reference.steps] == [0, 1, 2, 3]
    assert reference.values("train/num_microbatches") == [8.0] * 3
    losses = reference.values("train/loss")
    assert losses[0] > 3.5
    assert losses[2] < losses[0] - 0.2
    assert all(norm > 1 for norm in reference.values("train/grad_norm"))
    assert len(reference.values("val/loss")) == 2
    assert sum(reference.expert_load.values()) == 2 * 4 * sum(reference.values("train/num_tokens"))
    assert reference.values("train/moe/max_overload_factor") == [1.0] * 3, "one rank has all the work"


# What only Ray adds shows in these; each layout alone is a unit test too.
QUICK = {"tp2_ep2"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in LAYOUTS]
)
def test_layout_trains_as_one_worker_does(runs: Runs, name: str) -> None:
    num_workers, changes = LAYOUTS[name]
    run, reference = runs(num_workers, **changes), runs()
    assert_same_metrics(run, reference)
    assert run.expert_load == reference.expert_load
    assert_same_weights(run, reference)
    if "ep2" in name:
        assert all(1.0 < factor <= 2.0 for factor in run.values("train/moe/max_overload_factor"))


@pytest.mark.slow
def test_pipeline_stage_without_an_moe_layer(runs: Runs) -> None:
    run = runs(2, DENSE_STAGE, **layout(pp=2), **ZERO_1)
    reference = runs(1, DENSE_STAGE)
    assert_same_metrics(run, reference)
    assert run.expert_load == reference.expert_load
    assert {layer for _, layer, _ in run.expert_load} == {2, 3}
    of_layers = {key for key in run.metric_names() if key.startswith("train/moe/load_balancing_loss_layer_")}
    assert of_layers == {"train/moe/load_balancing_loss_layer_2", "train/moe/load_balancing_loss_layer_3"}
    assert_same_weights(run, reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_workers", "changes"),
    [
        (1, {"policy__sequence_packing__enabled": True, "policy__sequence_packing__train_mb_tokens": 70}),
        (2, {"policy__dynamic_batching__enabled": True, "policy__dynamic_batching__train_mb_tokens": 80}),
    ],
    ids=["packed", "dynamic_dp2"],
)
def test_batching_does_not_change_the_loss(runs: Runs, num_workers: int, changes: dict[str, Any]) -> None:
    # Without the auxiliary loss, which is a product of two means over a microbatch.
    run, reference = runs(num_workers, moe_aux_loss_coeff=0.0, **changes), runs(moe_aux_loss_coeff=0.0)
    for key in ("train/loss", "val/loss", "val/accuracy"):
        assert run.values(key) == pytest.approx(reference.values(key), rel=SAME_LOSS)
    assert run.values("train/grad_norm") == pytest.approx(reference.values("train/grad_norm"), rel=SAME_GRAD_NORM)
    assert all(1 < number < 8 for number in run.values("train/num_microbatches"))
    assert run.expert_load == reference.expert_load
    assert_same_weights(run, reference)


@pytest.mark.slow
def test_tracking_changes_nothing(runs: Runs) -> None:
    changes = layout(ep=2) | ZERO_1 | RECOMPUTE_MOE
    tracked = runs(2, **changes)
    untracked = runs(2, **changes, track_moe_metrics=False, moe_per_layer_logging=False)
    assert [key for key in untracked.metric_names() if "moe" in key] == []
    assert untracked.expert_load == {}
    assert {key for key in tracked.metric_names() if "moe" not in key} == untracked.metric_names()
    for key in ("train/loss", "train/grad_norm", "train/lr", "val/loss", "val/accuracy"):
        assert untracked.values(key) == tracked.values(key), "bit for bit"
    for name, weight in tracked.weights.items():
        assert torch.equal(untracked.weights[name], weight), name
