# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A pipeline stage without experts logs a part of the load balancing loss.

    python docs/upstream/aux_loss_dense_stage.py

Needs torch and megatron-core alone, and runs on CPUs.
"""

import os
import sys
import tempfile
from importlib.metadata import version
from unittest import mock

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TORCH_COMPILE_DISABLE": "1"}
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.overrides import TorchFunctionMode

# What Megatron-Core takes for granted and a CPU lacks: a current device and stream, and Triton. Nothing here runs them.
torch.cuda.current_device, torch.cuda.current_stream = (lambda: "cpu"), mock.MagicMock()
sys.modules["megatron.core.transformer.moe.ops.paged_stash"] = mock.MagicMock()

from megatron.core import parallel_state

WORLD_SIZE = 4


def reproduce(rank: int) -> dict[str, object]:
    """Two stages of two tensor-parallel ranks: the second has the experts, and each of its ranks half of the loss 1."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    name, num_layers = "load_balancing_loss", 2
    has_experts = parallel_state.get_pipeline_model_parallel_rank() == 1
    record(
        name,
        torch.tensor(0.5 if has_experts else 0.0),
        2,
        num_layers,
        # What a router passes, and what the other stages, which have none, are initialised with.
        reduce_group=parallel_state.get_tensor_and_context_parallel_group() if has_experts else None,
    )
    reduce_over_ranks(name)
    return {"load_balancing_loss that each rank logs (right: 1.0 on all)": recorded(name)[1].item()}


def record(*arguments, **groups) -> None:
    """Adds to a layer's loss, as a router does."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # 0.16
        from megatron.core.transformer.moe.moe_utils import save_to_aux_losses_tracker

        save_to_aux_losses_tracker(*arguments, **groups)
    else:
        get_moe_metrics_tracker().record(*arguments, **groups)


def recorded(name: str) -> torch.Tensor:
    """Megatron-Core's record of an auxiliary loss, a number for each layer."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # 0.16
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        return get_moe_layer_wise_logging_tracker()[name]["values"]
    return get_moe_metrics_tracker().metrics[name].values


def reduce_over_ranks(name: str) -> None:
    """Megatron-Core's own reduction of an auxiliary loss before it is logged."""
    all_reduce = dist.all_reduce

    def with_averages(tensor, op=dist.ReduceOp.SUM, group=None, **options):
        """The same with averages, which gloo lacks."""
        done = all_reduce(tensor, dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op, group=group, **options)
        if op == dist.ReduceOp.AVG:
            tensor /= dist.get_world_size(group)
        return done

    with mock.patch.object(dist, "all_reduce", with_averages):
        try:
            from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
        except ImportError:  # 0.16
            from megatron.core.transformer.moe.moe_utils import reduce_aux_losses_tracker_across_ranks

            reduce_aux_losses_tracker_across_ranks([name])
        else:
            get_moe_metrics_tracker()._sync_metrics([name])


class OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU if Megatron-Core asks for "cuda"."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Calls the function with another device."""
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def run(rank: int, store: str) -> None:
    """One rank; the first one prints what all have found."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)
    with OnCpu():
        found = reproduce(rank)
    of_ranks = [None] * WORLD_SIZE
    dist.all_gather_object(of_ranks, found)
    if rank == 0:
        print("megatron-core", version("megatron-core"))
        for name in found:
            print(f"{name}: {', '.join(str(values[name]) for values in of_ranks)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, (f"{folder}/store",), nprocs=WORLD_SIZE, start_method="fork")
