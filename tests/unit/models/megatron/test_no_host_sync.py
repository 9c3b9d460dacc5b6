# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tracking neither waits for the device before the report, nor changes a bit of the training."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import per_sequence
from nemo_rl_moe.models.megatron.training.observers import ExpertLoadReports
from nemo_rl_moe.models.megatron.training.step_observer import StepObservations, StepObserver
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import full, listed, slow
from tests.support.tiny_model import layout, tiny_batch, tiny_grpo_policy, tiny_policy
from tests.support.training_run import NUM_STEPS, RunSettings, shard_of_step, tiny_trainer, train_run
from tests.unit.models.megatron.tiny_trainers import PACKED, UNTRACKED, shard_for

# Methods that hand a value to Python; not all of them are operations that the dispatcher sees.
METHODS = {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__len__", "__contains__"}
# Operations whose result's shape depends on the data, or that end on the host.
OPERATIONS = {
    "_local_scalar_dense",
    "_unique2",
    "argwhere",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class _Functions(TorchFunctionMode):
    def __init__(self, counts: Counter[str]):
        super().__init__()
        self.counts = counts

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in METHODS - {"__len__"}:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, counts: Counter[str]):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        indices = args[1] if name in INDEXING else []
        by_mask = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
        if name in OPERATIONS or by_mask:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


class Waits:
    """Counts what would make the host wait for an accelerator, until `stop`."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._modes = (_Functions(self.counts), _Operations(self.counts))
        self._until_stop: dict[str, int] = {}

    def __enter__(self) -> "Waits":
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def stop(self) -> None:
        """Notes the counts of this moment."""
        self._until_stop = dict(self.counts)

    @property
    def until_stop(self) -> dict[str, int]:
        return self._until_stop


class StopBeforeReport(StepObserver):
    """Stands before the observer of the expert load."""

    def __init__(self, waits: Waits):
        self._waits = waits

    def end_step(self) -> StepObservations:
        self._waits.stop()
        return StepObservations()


def stop_before_report(trainer: MegatronTrainer, waits: Waits) -> None:
    kinds = [type(observer) for observer in trainer.observers]
    place = kinds.index(ExpertLoadReports) if ExpertLoadReports in kinds else len(kinds)
    trainer.observers.insert(place, StopBeforeReport(waits))


def waits_of_step(settings: RunSettings) -> tuple[dict[str, int], dict[str, int]]:
    """Counts on this rank from the start of the second step to its MoE report, and in all of it."""
    with tiny_trainer(settings.policy, settings.model) as trainer:
        trainer.train([shard_of_step(trainer, settings, 0)], sft_loss)
        shard = shard_of_step(trainer, settings, 1)
        waits = Waits()
        stop_before_report(trainer, waits)
        with waits:
            trainer.train([shard], sft_loss)
        return waits.until_stop, dict(waits.counts)


def waits_with_advantages(policy: PolicyConfig) -> dict[str, int]:
    """Counts on this rank of a step whose sequences have advantages, from its start to its MoE report."""
    with tiny_trainer(policy) as trainer:
        waits = Waits()
        stop_before_report(trainer, waits)
        batch = tiny_batch(1).with_columns(advantages=per_sequence(torch.arange(8.0)))
        shard = shard_for(trainer, batch)
        trainer.train([shard], sft_loss)
        with waits:
            metrics = trainer.train([shard], sft_loss).moe_metrics
        asked = policy.megatron_cfg.experts_by_advantage  # type: ignore[attr-defined]
        assert ("routing_advantage/excess" in metrics) == (asked and dist.get_rank() == 0)
        return waits.until_stop


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "changes"), [(1, {}), full(1, PACKED), full(2, layout(tp=2)), slow(2, layout(pp=2, vpp=2))]
)
def test_experts_by_advantage_wait_for_nothing_before_the_report(world_size: int, changes: dict[str, Any]) -> None:
    off, on = (
        run_ranks(waits_with_advantages, world_size, tiny_grpo_policy(world_size, experts_by_advantage=flag, **changes))
        for flag in (False, True)
    )
    assert on == off
    assert sum(on[0].values()) > 0


JOBS: dict[str, tuple[int, dict[str, Any]]] = {
    "local": (1, {"layer_spec": "local"}),
    "auto": (1, {"layer_spec": "auto"}),
    "recompute": (1, {"layer_spec": "auto", "activation_checkpointing": "full"}),
    "capacity": (1, {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}),
    "ep2": (2, layout(ep=2)),
    "images": (2, layout(tp=2)),
    "pp2_vpp2": (2, layout(pp=2, vpp=2)),
}


# "ep2" does on two ranks what "auto" does on one.
@pytest.mark.parametrize("name", listed(JOBS, quick=("recompute", "ep2"), in_full=JOBS.keys() - {"auto"}))
def test_tracking_waits_for_nothing_before_the_report(name: str) -> None:
    world_size, changes = JOBS[name]
    off, on = (
        run_ranks(
            waits_of_step,
            world_size,
            RunSettings(tiny_policy(world_size, track_moe_metrics=flag, **logs, **changes), images=name == "images"),
        )
        for flag, logs in (
            (False, {"moe_per_layer_logging": False}),
            (True, {"moe_per_layer_logging": True, "moe_metrics__mode": "detailed"}),
        )
    )
    for (before_report_off, _), (before_report_on, whole_step_on) in zip(off, on, strict=True):
        assert before_report_on == before_report_off
        # The step itself waits (for the gradient norm, say), so that an empty count would mean a broken counter.
        assert sum(before_report_off.values()) > 0
        assert whole_step_on.get("tolist", 0) > before_report_on.get("tolist", 0), "the report was not seen"


def test_the_counter_sees_what_waits() -> None:
    values = torch.tensor([0.0, 1.0, 2.0])
    provocations: dict[str, Any] = {
        "item": lambda: values[0].item(),
        "tolist": lambda: values.tolist(),
        "cpu": lambda: values.cpu(),
        "numpy": lambda: values.numpy(),
        "__bool__": lambda: bool(values[1]),
        "__int__": lambda: int(values[1]),
        "__float__": lambda: float(values[1]),
        "__contains__": lambda: 1.0 in values,
        "nonzero": lambda: values.nonzero(),
        "bincount": lambda: values.long().bincount(),
        "_unique2": lambda: values.unique(),
        "masked_select": lambda: values.masked_select(values > 0),
        "index": lambda: values[values > 0],
        "index_put_": lambda: values.clone().__setitem__(values > 0, torch.zeros(2)),
        "equal": lambda: values.equal(values),
        "repeat_interleave": lambda: values.repeat_interleave(torch.tensor([1, 2, 3])),
    }
    for name, provoke in provocations.items():
        waits = Waits()
        with waits:
            provoke()
        assert waits.counts[name] > 0, name
    waits = Waits()
    with waits:
        _ = values[torch.tensor([0, 2])] + values.sum()
    assert waits.counts == {}


@pytest.mark.full
@pytest.mark.parametrize("name", [slow("local"), slow("auto"), "ep2", full("capacity"), full("pp2_vpp2")])
def test_tracking_changes_no_bit(name: str) -> None:
    world_size, changes = JOBS[name]
    settings = {"off": UNTRACKED, "brief": {}, "detailed": {"moe_metrics__mode": "detailed"}}
    runs = {
        mode: run_ranks(train_run, world_size, RunSettings(tiny_policy(world_size, **logs, **changes)))
        for mode, logs in settings.items()
    }
    for mode in ("brief", "detailed"):
        for off, on in zip(runs["off"], runs[mode], strict=True):
            assert on.losses == off.losses
            assert on.grad_norms == off.grad_norms
            assert off.moe_metrics == [{}] * NUM_STEPS
            assert all(metrics["cv_mean"] > 0 for metrics in on.moe_metrics)
            assert on.pieces.keys() == off.pieces.keys()
            for key, values in on.pieces.items():
                np.testing.assert_array_equal(values, off.pieces[key], err_msg=str(key))
