# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Optimizer state that leaves the device and comes back: to the bit, with every byte of its old storage given back."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.models.megatron.checkpoint.inner_optimizers import device_optimizers, optimizer_parts
from nemo_rl_moe.models.megatron.model import host_memory
from tests.support.gloo_ranks import run_ranks
from tests.support.gpu_stand_ins import fused_adam
from tests.support.tiny_model import parallel_job, tiny_policy
from tests.support.training_run import RunSettings, build_trainer, shard_of_step

SHARDED = {"distributed_data_parallel_config__use_distributed_optimizer": True}
BFLOAT16 = {"precision": "bfloat16"}
OFFLOADED = {
    "optimizer__use_precision_aware_optimizer": True,
    "optimizer__optimizer_cpu_offload": True,
    "optimizer__optimizer_offload_fraction": 0.5,
}
CASES: dict[str, dict[str, Any]] = {
    "bfloat16, sharded": BFLOAT16 | SHARDED,
    "bfloat16, whole": BFLOAT16,
    "float32, sharded": SHARDED,
    "half on the host": BFLOAT16 | SHARDED | OFFLOADED,
    "moments in bfloat16": BFLOAT16 | SHARDED,
}


def job_of(case: str, num_ranks: int = 1) -> RunSettings:
    policy = tiny_policy(num_ranks, **CASES[case])
    if case == "moments in bfloat16":  # past the rules, which want a GPU for it
        chosen = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
        optimizer = policy.megatron_cfg.optimizer.model_copy(update=chosen)
        megatron = policy.megatron_cfg.model_copy(update={"optimizer": optimizer})
        policy = policy.model_copy(update={"megatron_cfg": megatron})
    return RunSettings(policy)


def train(trainer: Any, job: RunSettings, step: int) -> tuple[float, float]:
    result = trainer.train([shard_of_step(trainer, job, step)], sft_loss)
    return result.global_loss, result.grad_norm


def moments_and_masters(trainer: Any) -> Iterator[torch.Tensor]:
    """Every tensor of the optimizer that is not the model's own, each once."""
    model = {p.untyped_storage().data_ptr() for chunk in trainer.chunks for p in chunk.parameters()}
    seen: set[int] = set()
    for part in optimizer_parts(trainer.optimizer):
        for inner in device_optimizers(part):
            states = [v for s in inner.state.values() for k, v in s.items() if k != "step"]
            for tensor in [p for group in inner.param_groups for p in group["params"]] + states:
                if id(tensor) not in seen and tensor.untyped_storage().data_ptr() not in model:
                    seen.add(id(tensor))
                    yield tensor


def round_trip(job: RunSettings, *, travels: bool, folder: str = "") -> tuple[list[tuple[float, float]], list[Any]]:
    """Three steps, with the state away behind each where it travels; a checkpoint is saved while it is."""
    with parallel_job(job.policy), fused_adam() if _is_fused(job) else nullcontext():
        trainer = build_trainer(job.policy, job.model)
        steps = [train(trainer, job, 0)]
        for step in (1, 2):
            scores = trainer.logprobs(shard_of_step(trainer, job, step).microbatches)
            if travels:
                tensors = list(moments_and_masters(trainer))
                values, old = [t.clone() for t in tensors], [StorageWeakRef(t.untyped_storage()) for t in tensors]
                num_bytes, gradients = sum(t.nbytes for t in tensors), gradient_storages(trainer)
                num_bytes += sum(storage.nbytes() for storage in gradients)
                assert trainer.host_state.leave() == num_bytes > 0
                assert trainer.host_state.leave() == 0
                assert all(reference.expired() for reference in old)
                assert [storage.nbytes() for storage in gradients] == [0] * len(gradients)
                assert all(torch.equal(t, value) for t, value in zip(tensors, values, strict=True))
                assert [id(t) for t in moments_and_masters(trainer)] == [id(t) for t in tensors]
                if folder and step == 1:
                    trainer.start_checkpoint(Path(folder), with_optimizer=True)
                    assert trainer.finish_checkpoint() is None
                again = trainer.logprobs(shard_of_step(trainer, job, step).microbatches)
                assert all(torch.equal(*pair) for pair in zip(scores, again, strict=True))
                if step == 2:
                    on_host = [StorageWeakRef(t.untyped_storage()) for t in tensors]
                    trainer.host_state.come_back()
                    assert not {t.untyped_storage().data_ptr() for t in tensors} & {r.cdata for r in on_host}
                    assert all(torch.equal(t, value) for t, value in zip(tensors, values, strict=True))
            steps.append(train(trainer, job, step))
        return steps, [p.detach().float().numpy().copy() for chunk in trainer.chunks for p in chunk.parameters()]


def gradient_storages(trainer: Any) -> list[torch.UntypedStorage]:
    chunks = trainer.ddp_chunks
    return [b.grad_data.untyped_storage() for c in chunks for b in (*c.buffers, *c.expert_parallel_buffers)]


def _is_fused(job: RunSettings) -> bool:
    return job.policy.megatron_cfg.optimizer.exp_avg_dtype == "bfloat16"


def travel(job: RunSettings, folder: str) -> tuple[list[tuple[float, float]], list[Any]]:
    """`round_trip` of a state that travels."""
    return round_trip(job, travels=True, folder=folder)


def stay(job: RunSettings) -> tuple[list[tuple[float, float]], list[Any]]:
    """`round_trip` of one that stays."""
    return round_trip(job, travels=False)


def resume(job: RunSettings, folder: str) -> list[tuple[float, float]]:
    """Two steps from the checkpoint that was saved while the state was away."""
    with parallel_job(job.policy), fused_adam() if _is_fused(job) else nullcontext():
        trainer = build_trainer(job.policy, job.model)
        trainer.load_checkpoint(Path(folder), with_optimizer=True)
        return [train(trainer, job, step) for step in (1, 2)]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == "half on the host" else pytest.mark.full) for case in CASES]
)
def test_a_round_trip_leaves_no_trace(case: str, tmp_path: Path) -> None:
    num_ranks = 2 if case == "bfloat16, sharded" else 1
    job = job_of(case, num_ranks)
    expected, found = run_ranks(stay, num_ranks, job), run_ranks(travel, num_ranks, job, str(tmp_path))
    for (steps, weights), (after, travelled) in zip(expected, found, strict=True):
        assert after == steps
        assert steps[1] != steps[2]
        assert all((left == right).all() for left, right in zip(weights, travelled, strict=True))
    assert run_ranks(resume, num_ranks, job, str(tmp_path)) == [steps[1:] for steps, _ in expected]


@pytest.mark.parametrize("slab_bytes", [64, 200, 10**6])
def test_host_tensors_do_not_overlap(slab_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "SLAB_BYTES", slab_bytes)
    kinds = [((3, 5), torch.float32), ((7,), torch.bfloat16), ((0,), torch.float32), ((40,), torch.int16)]
    tensors = [torch.full(shape, float(n), dtype=dtype) for n, (shape, dtype) in enumerate([*kinds, ((), torch.half)])]
    found = host_memory.host_tensors(tensors, pinned=False)
    for host, tensor in zip(found, tensors, strict=True):
        host.copy_(tensor)
    assert [(t.shape, t.dtype, t.tolist()) for t in found] == [(t.shape, t.dtype, t.tolist()) for t in tensors]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found if t.numel()}
    assert sum(storages.values()) <= sum(-(-t.nbytes // 64) * 64 for t in tensors) + (slab_bytes < 10**6) * 400
