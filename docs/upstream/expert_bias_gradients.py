# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism adds up the gradients of different experts' biases.

    python docs/upstream/expert_bias_gradients.py

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
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

WORLD_SIZE = 2


def reproduce(rank: int) -> dict[str, object]:
    """Two tensor- and expert-parallel ranks, each with an expert of its own: one token and three."""
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
    output, bias = model(torch.ones(1 + 2 * rank, 4))
    (output + bias).sum().backward()
    finalize_model_grads([model])
    return {"gradient of each expert's bias (right: 1.0, 3.0)": expert.bias.main_grad[0].item()}


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
