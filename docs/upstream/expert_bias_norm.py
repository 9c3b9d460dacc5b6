# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The gradient norm leaves out experts' biases on all tensor-parallel ranks but the first.

    python docs/upstream/expert_bias_norm.py

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
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

WORLD_SIZE = 2


def reproduce(rank: int) -> dict[str, object]:
    """Two tensor- and expert-parallel ranks, each with an expert of its own, whose bias of 4 has the gradient 1."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1
    )
    config = TransformerConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=2,
        num_moe_experts=2,
        tensor_model_parallel_size=2,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
        sequence_parallel=True,
        use_cpu_initialization=True,
    )
    expert = RowParallelLinear(
        4,
        4,
        config=config,
        init_method=torch.nn.init.ones_,
        bias=True,
        input_is_parallel=True,
        skip_bias_add=True,
        is_expert=True,
    )
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), expert)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), [model])
    expert.weight.main_grad.zero_()
    expert.bias.main_grad.fill_(1.0)
    optimizer.prepare_grads()
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    method = "get_main_grads_for_grad_norm"
    if not hasattr(parts[0], method):  # 0.19
        method = "get_grads_for_grad_norm"
    counted = float(sum(grad.square().sum() for part in parts for grad in getattr(part, method)()))
    return {"part of each rank in the squared gradient norm (right: 4.0, 4.0)": counted}


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
