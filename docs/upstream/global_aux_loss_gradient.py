# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The gradient of the global-batch load balancing loss is divided by the number of data-parallel ranks.

    python docs/upstream/global_aux_loss_gradient.py

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
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

moe_utils.te_general_gemm = None  # 0.16.1 reads this name, and binds it where Transformer Engine is alone

WORLD_SIZE = 2


def reproduce(rank: int) -> dict[str, object]:
    """Two data-parallel ranks with the same tokens: the loss of all is `aux_loss`, that of each rank alone."""
    parallel_state.initialize_model_parallel()
    alone, together = (gradient(kind) for kind in ("aux_loss", "global_aux_loss"))
    loss = recorded("global_load_balancing_loss")
    dist.all_reduce(loss)
    return {
        "global_load_balancing_loss over that of one rank (right: 1.0)": round(
            (loss / recorded("load_balancing_loss")).item(), 3
        ),
        "its gradient over that of one rank (right: 1.0)": round((together / alone).item(), 3),
    }


def gradient(kind: str) -> torch.Tensor:
    """Norm of the router's gradient through a balancing loss, the mean over data-parallel ranks."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=1,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_router_load_balancing_type=kind,
        moe_aux_loss_coeff=1.0,
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    torch.manual_seed(0)
    router = TopKRouter(config=config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    router.set_layer_number(1)
    probs, _ = router(torch.randn(6, 1, 4))
    (0.0 * probs.sum()).backward()
    dist.all_reduce(router.weight.grad)
    return (router.weight.grad / WORLD_SIZE).norm()


def recorded(name: str) -> torch.Tensor:
    """Megatron-Core's record of an auxiliary loss, a number for each layer."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # 0.16
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        return get_moe_layer_wise_logging_tracker()[name]["values"]
    return get_moe_metrics_tracker().metrics[name].values


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
