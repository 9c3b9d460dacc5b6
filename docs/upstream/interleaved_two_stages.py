# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""An interleaved pipeline of two stages swaps activations and gradients.

    python docs/upstream/interleaved_two_stages.py

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
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.transformer_config import TransformerConfig

WORLD_SIZE = 2


def reproduce(rank: int) -> dict[str, object]:
    """Two stages: each sends 10 + its rank to the next one and 20 + its rank to the one before; all in one batch."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    found = {}
    for batched in (True, False):
        config = TransformerConfig(
            num_layers=4,
            hidden_size=4,
            num_attention_heads=1,
            pipeline_model_parallel_size=2,
            virtual_pipeline_model_parallel_size=2,
            pipeline_dtype=torch.float32,
            batch_p2p_comm=batched,  # True is the default
            batch_p2p_sync=False,
        )
        communicator = P2PCommunicator(parallel_state.get_pipeline_model_parallel_group(), config)
        received = communicator.send_forward_backward_recv_forward_backward(
            torch.full((1,), 10.0 + rank), torch.full((1,), 20.0 + rank), True, True, (1,)
        )
        name = f"received from the stage before and the next one, batch_p2p_comm={batched} (right: [11, 21], [10, 20])"
        found[name] = [int(tensor) for tensor in received]
    return found


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
