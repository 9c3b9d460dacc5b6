# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A GRPO step, log-probabilities and generation with tensors that are taken for a GPU's: where the host would wait."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import TokenBatch, per_token
from nemo_rl_moe.token_lag import NO_LAG, TOKEN_LAG
from tests.support.gloo_ranks import run_ranks, run_ranks_with_engine
from tests.support.pretended_gpu import PretendedGpu, Wait, by_owner
from tests.support.quick_list import slow
from tests.support.tiny_model import MICROBATCHES, layout, parallel_job, shard_of_rank, tiny_batch, tiny_grpo_policy
from tests.support.training_run import build_trainer, request_of
from tests.unit.models.megatron.tiny_trainers import PACKED, policy_gradient_loss, with_advantages, with_random_routes

Waits = dict[Wait, int]
JOBS = [(1, {}), slow(1, PACKED), slow(2, layout(tp=2)), slow(2, layout(pp=2))]


def rl_batch() -> TokenBatch:
    """Eight sequences with advantages, log-probabilities, lags and a capture of random routes."""
    batch = with_random_routes(with_advantages(tiny_batch(3)))
    lags = torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids) % 7
    return batch.with_columns(**{TOKEN_LAG: per_token(lags.int(), fill=NO_LAG)})


def step(policy: PolicyConfig, pretended: bool, microbatches: tuple[tuple[int, ...], ...]) -> tuple[Any, ...]:
    """Loss, norm and metrics of the second step of two, and the waits of each kind of pass."""
    loss = policy_gradient_loss()
    gpu = PretendedGpu()

    def run() -> tuple[Any, ...]:
        trainer = build_trainer(policy)
        shard = shard_of_rank(rl_batch(), microbatches=microbatches)
        found: dict[str, Waits] = {}

        def measured(name: str, function: Callable[[], Any]) -> Any:
            gpu.waits.clear()
            result = function()
            found[name] = dict(gpu.waits)
            return result

        trainer.train([shard], loss)
        result = measured("train", lambda: trainer.train([shard], loss))
        measured("logprobs", lambda: trainer.logprobs(shard.microbatches))
        measured("generate", lambda: trainer.generate(request_of(range(4)), None))
        return result.global_loss, result.grad_norm, result.moe_metrics, found

    with parallel_job(policy):
        if not pretended:
            return run()
        with gpu.plugged_in():
            return run()


# Where the host may wait in a step of training, as often, and why.
TRAINING: dict[tuple[str, str], tuple[int, str]] = {
    ("expert_advantages.ExpertAdvantageRecorder._of_whole_batch", "copy to the device"): (1, "once, before the passes"),
    ("forward_backward.metrics_to_host", "tolist"): (1, "the metrics of all microbatches, once a global batch"),
    ("trainer.MegatronTrainer._sum_over_ranks", "tensor"): (1, "the loss, which decides whether to update"),
    ("trainer.MegatronTrainer._sum_over_ranks", "_local_scalar_dense"): (1, "the same"),
    ("expert_load_recorder.reduce_over_ranks", "copy to the host"): (4, "report: load, statistics, checks, advantages"),
    ("expert_load_recorder.reduce_over_ranks.<listcomp>.<listcomp>", "copy to the device"): (1, "report"),
    ("route_checks.RouteProbe.reduced", "copy to the host"): (1, "report"),
    ("token_means.TokenMeans.end_step", "tolist"): (1, "report: routing confidence"),
}
LOGPROBS = {("megatron_model.MegatronModel.measure", "copy to the host")}
GENERATION = {
    ("captured_routes.CapturedRoutes.sequences", "copy to the host"),
    ("captured_routes.CapturedRoutes.sequences", "tensor"),  # of a stage, beside that copy
    ("engine.MegatronGenerator._run", "copy to the device"),
    ("engine.MegatronGenerator._run", "copy to the host"),
    ("sampling.plan_slots", "copy to the device"),
}
# In Megatron-Core: the norm decides whether to update, experts take rows by counts that the host knows, stages wait.
MEGATRON = {
    "clip_grads.get_grad_norm_fp32",
    "utils.local_multi_tensor_l2_norm",  # of 0.19
    "token_dispatcher.MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize",
    "p2p_communication.P2PCommunicator._communicate",  # between stages, after batched sends
}


@pytest.mark.full
@pytest.mark.parametrize(("world_size", "changes"), JOBS)
def test_the_host_waits_where_the_table_says_alone(world_size: int, changes: dict[str, Any]) -> None:
    policy = tiny_grpo_policy(world_size, routing_replay="rollout", **changes)
    plain = run_ranks_with_engine(step, world_size, policy, False, MICROBATCHES)
    pretended = run_ranks_with_engine(step, world_size, policy, True, MICROBATCHES)
    for (*numbers, _), (*expected, _) in zip(pretended, plain, strict=True):
        assert numbers == expected
    for *_, found in pretended:
        ours = {name: by_owner(waits.items(), "ours") for name, waits in found.items()}
        assert {each: count for each, count in ours["train"].items() if count > TRAINING.get(each, (0, ""))[0]} == {}
        assert ours["logprobs"].keys() <= LOGPROBS
        assert ours["generate"].keys() <= GENERATION
        of_megatron = {wait.function for waits in found.values() for wait in waits if wait.owner == "megatron"}
        assert of_megatron <= MEGATRON
        assert of_megatron, "an empty count would mean a broken counter"


def kinds_of_each() -> dict[str, list[str]]:
    """Return what is counted for each of these; or the error's class."""
    found: dict[str, list[str]] = {}
    gpu = PretendedGpu()
    with gpu.plugged_in():
        x = torch.ones(3, 4, device="cuda")
        calls: dict[str, Callable[[], Any]] = {
            "item": lambda: x.sum().item(),
            "bool": lambda: bool(x.any()),
            "tolist": x.tolist,
            "cpu": x.cpu,
            "to device": lambda: torch.ones(3).to("cuda", non_blocking=True),
            "pinned": lambda: torch.ones(3).pin_memory().to("cuda", non_blocking=True),
            "tensor": lambda: torch.tensor([1, 2], device=x.device),
            "mask": lambda: x[x > 0],
            "fill by mask": lambda: x.__setitem__(x > 0, 1.0),
            "list": lambda: x[[0, 1]],
            "copy_": lambda: x.copy_(torch.ones(3, 4)),
            "synchronize": torch.cuda.synchronize,
            "scalar": lambda: (x + torch.tensor(1.0)).softmax(-1),
            "mixed": lambda: x + torch.ones(4),
            "numpy": x.numpy,
        }
        for name, call in calls.items():
            gpu.waits.clear()
            try:
                call()
                found[name] = [wait.kind for wait in gpu.waits]
            except (RuntimeError, TypeError) as error:
                found[name] = [type(error).__name__]
    return found


def test_the_counter_sees_what_waits_and_what_is_mixed() -> None:
    (found,) = run_ranks(kinds_of_each, 1)
    assert found == {
        "item": ["_local_scalar_dense"],
        "bool": ["_local_scalar_dense"],
        "tolist": ["tolist"],
        "cpu": ["copy to the host"],
        "to device": ["copy to the device"],
        "pinned": [],
        "tensor": ["tensor"],
        "mask": ["index by a mask"],
        "fill by mask": [],
        "list": ["indices from the host"],
        "copy_": ["copy to the device"],
        "synchronize": ["synchronize"],
        "scalar": [],
        "mixed": ["RuntimeError"],
        "numpy": ["TypeError"],
    }
