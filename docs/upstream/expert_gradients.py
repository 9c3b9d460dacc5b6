# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Gradients of experts that tensor parallelism does not cut are not reduced.

    python docs/upstream/expert_gradients.py

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
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

WORLD_SIZE = 2


def reproduce(rank: int) -> dict[str, object]:
    """Two tensor-parallel ranks with a copy of the same expert each, and other tokens of the sequence."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, expert_tensor_parallel_size=1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=2,
        num_moe_experts=2,
        tensor_model_parallel_size=2,
        expert_tensor_parallel_size=1,
        sequence_parallel=True,
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    expert = ColumnParallelLinear(
        4,
        4,
        config=config,
        init_method=torch.nn.init.ones_,
        bias=False,
        gather_output=False,
        skip_bias_add=True,
        is_expert=True,
    )
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), expert)
    tokens = torch.full((1, 4), 1.0 + rank)  # the gradient of a weight is 1 by the first token, 2 by the second
    model(tokens)[0].sum().backward()
    model.finish_grad_sync()
    return {"gradient of the expert on each rank (right: 3.0 on both)": expert.weight.main_grad[0, 0].item()}


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
