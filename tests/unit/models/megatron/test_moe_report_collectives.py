# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A report takes few collectives and one copy to the host, whatever the model, the batch and the options."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.distributed.batch import TokenBatch, per_token
from nemo_rl_moe.models.megatron.training import observers
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import listed
from tests.support.tiny_model import (
    layout,
    parallel_job,
    tiny_batch,
    tiny_grpo_policy,
    tiny_hf_config,
    tiny_policy,
    with_image_tokens,
)
from tests.support.training_run import tiny_trainer
from tests.unit.models.megatron.test_no_host_sync import Waits
from tests.unit.models.megatron.tiny_trainers import EXPERT_BIAS, shard_for, with_advantages, with_random_routes


class CollectiveLog(TorchDispatchMode):
    """Notes every operation of torch.distributed, whatever function called it, and the bytes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.bytes: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.names.append(function._schema.name.removeprefix("c10d::"))
            tensors = [item for item in tree_leaves(args) if isinstance(item, torch.Tensor)]
            self.bytes.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Job:
    """What is trained and reported."""

    world_size: int = 2
    sizes: Mapping[str, int] = field(default_factory=lambda: {"ep": 2})
    changes: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    microbatches: tuple[tuple[int, ...], ...] = ((0, 1), (2, 3), (4, 5), (6, 7))
    images: bool = False


def logged_report(job: Job) -> dict[str, Any]:
    """One step on every rank: what the report did, and what it said."""
    policy = tiny_policy(job.world_size, **layout(**job.sizes), **job.changes)
    collectives, waits = CollectiveLog(), Waits()
    collect = observers.get_moe_metrics

    def logged(*args: Any, **kwargs: Any) -> Any:
        with collectives, waits:
            return collect(*args, **kwargs)

    with parallel_job(policy), mock.patch.object(observers, "get_moe_metrics", logged):
        trainer = MegatronTrainer(policy, tiny_hf_config(**job.model), None, num_steps=10)
        batch = with_image_tokens(tiny_batch(1)) if job.images else tiny_batch(1)
        shard = shard_for(trainer, batch, job.microbatches)
        result = trainer.train([shard], sft_loss)
        found = {"collectives": collectives.names, "bytes": collectives.bytes}
        return {**found, "waits": dict(waits.counts), "metrics": result.moe_metrics}


JOBS = {
    "ep2": Job(),
    "many_layers": Job(model={"num_hidden_layers": 8}),
    "many_experts": Job(model={"num_experts": 32}),
    "many_microbatches": Job(microbatches=tuple((index,) for index in range(8))),
    "many_names": Job(
        changes={
            "moe_router_load_balancing_type": "[aux_loss,seq_aux_loss,global_aux_loss]",
            "moe_aux_loss_coeff": "[0.01,0.01,0.01]",
            "moe_z_loss_coeff": 0.001,
            "moe_metrics__mode": "detailed",
            "moe_metrics__what_if_expert_parallel_sizes": "[1,4,8]",
        }
    ),
    "no_overload": Job(changes={"log_moe_overload_factor": False, "moe_per_layer_logging": False}),
    "no_losses": Job(changes={"moe_router_load_balancing_type": "none"}),
    "dp2": Job(sizes={}),
    "what_if_over_slices": Job(sizes={}, changes={"moe_metrics__what_if_expert_parallel_sizes": "[2,4]"}),
    "tp2": Job(sizes={"tp": 2}),
    "pp2_vpp2": Job(sizes={"pp": 2, "vpp": 2}),
    "pp2_ep2": Job(4, {"pp": 2, "ep": 2}),
    "images": Job(images=True),
    "stage_without_experts": Job(sizes={"pp": 2}, model={"mlp_only_layers": [0, 1]}),
}


# Two dimensions at a time, or more of one thing, are in the others.
COVERED_BY_OTHERS = {"dp2", "many_layers", "pp2_vpp2"}


SUM_AND_MAXIMUM = ["allreduce_", "allreduce_"]
OTHER_COLLECTIVES = {"no_overload": ["allreduce_"], "what_if_over_slices": ["alltoall_base_", *SUM_AND_MAXIMUM]}
WITHIN_A_SLICE = {
    "ep2",
    "many_layers",
    "many_experts",
    "many_microbatches",
    "many_names",
    "no_losses",
    "pp2_ep2",
    "images",
}
"""Whose ranks that exchange tokens add up their counts first."""


@pytest.mark.parametrize("name", listed(JOBS, quick=("ep2", "many_names"), in_full=JOBS.keys() - COVERED_BY_OTHERS))
def test_few_collectives_and_one_copy(name: str) -> None:
    reports = run_ranks(logged_report, JOBS[name].world_size, JOBS[name])
    for report in reports:
        in_slice = ["allreduce_"] if name in WITHIN_A_SLICE else []
        assert report["collectives"] == in_slice + OTHER_COLLECTIVES.get(name, SUM_AND_MAXIMUM)
        # All that follows the copy works on the host.
        assert next(iter(report["waits"])) == "cpu"
        assert report["waits"]["cpu"] == 1
        assert report["metrics"] == reports[0]["metrics"]
    assert "cv_mean" in reports[0]["metrics"]


@pytest.mark.full
def test_bytes_over_the_whole_job_do_not_grow_with_microbatches_and_slices() -> None:
    names = ("ep2", "many_microbatches", "dp2", "images")
    few, many, two_slices, images = (run_ranks(logged_report, 2, JOBS[name])[0]["bytes"] for name in names)
    layers, experts, one_loss, one_size = 4, 8, 1, 1
    in_slice = 2 * layers * 2 * 4  # microbatches of a rank, layers, ranks of 4 bytes
    over_capacity = 2  # assignments, and all of them
    numbers = layers * (one_loss + experts + 2 * one_size) + over_capacity
    assert few == [in_slice, 8 * numbers, 8 * (layers * one_size + 1)]
    assert many == [2 * in_slice, *few[1:]]
    assert two_slices == few[1:]
    assert images == [in_slice, few[1] + 8 * layers * experts, few[2]]


def test_one_rank_needs_no_collective() -> None:
    (report,) = run_ranks(logged_report, 1, Job(world_size=1, sizes={}))
    assert report["collectives"] == []


def observers_and_collectives(policy: Any) -> list[tuple[str, list[str], list[int]]]:
    """Each observer's class, with the operations that a rank enters at the end of a step for it, and their bytes."""
    with tiny_trainer(policy) as trainer:
        logs = []
        for observer in trainer.observers:
            logs.append((type(observer).__name__, CollectiveLog()))
            observer.end_step = partial(_logged, logs[-1][1], observer.end_step)  # type: ignore[method-assign]
        shard = shard_for(trainer, batch_with_routes())
        trainer.train([shard], sft_loss)
        return [(name, log.names, log.bytes) for name, log in logs]


def _logged(log: CollectiveLog, end_step: Callable[[], Any]) -> Any:
    with log:
        return end_step()


def batch_with_routes() -> TokenBatch:
    """Sequences with advantages and with routed experts."""
    batch = with_random_routes(with_advantages(tiny_batch(1)))
    return batch.with_columns(token_writers=per_token(batch.token_mask.to(torch.int8)))


OBSERVED = {
    "routing_replay": "rollout",
    "experts_by_advantage": True,
    "experts_by_writer": True,
    "moe_router_bias_update_rate": 0.01,
    **EXPERT_BIAS,
    "router_gradients__every_n_steps": 1,
}
IN_ORDER = {
    "RouterGradients": [],
    "RoutingReports": ["allreduce_", "allreduce_", "allreduce_"],
    "ExpertLoadReports": ["allreduce_", *SUM_AND_MAXIMUM],
    "ExpertBiasReports": ["allreduce_"],
    "RoutingConfidence": ["allreduce_"],
    "ExpertAdvantageRecorder": ["allreduce_"],
    "ExpertWriterRecorder": ["allreduce_"],
}


def test_observers_enter_the_same_collectives_in_the_same_order_on_every_rank() -> None:
    ranks = run_ranks(observers_and_collectives, 2, tiny_grpo_policy(2, **layout(ep=2), **OBSERVED))
    assert ranks[0] == ranks[1]
    assert [(name, names) for name, names, _ in ranks[0]] == list(IN_ORDER.items())


def test_pipeline_stages_enter_the_same_collectives() -> None:
    policy = tiny_grpo_policy(2, **layout(pp=2), **OBSERVED)
    first, second = run_ranks(observers_and_collectives, 2, policy)
    assert first == second
    assert [name for name, _, _ in first] == list(IN_ORDER)


def provoke_log() -> list[str]:
    """Calls on a real process group that the log must see."""
    with parallel_job(tiny_policy(2)), CollectiveLog() as collectives:
        ones = torch.ones(2)
        dist.all_reduce(ones)
        dist.broadcast(ones, 0)
        dist.all_gather([torch.empty(2), torch.empty(2)], ones)
        dist.all_gather_object([None, None], "text")
        dist.barrier()
        return collectives.names


def test_the_log_sees_what_it_should() -> None:
    for collectives in run_ranks(provoke_log, 2):
        assert collectives[:3] == ["allreduce_", "broadcast_", "allgather_"]
        assert len(collectives) >= 5
        assert "barrier" in collectives
