# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""With per-token losses, the sequence-level balancing loss weighs less the more sequences a microbatch has.

    python docs/upstream/seq_aux_loss_batch.py

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

WORLD_SIZE = 1


def reproduce(rank: int) -> dict[str, object]:
    """Two sequences, in two microbatches and in one; `calculate_per_token_loss` makes gradients sums over tokens."""
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=1,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=1.0,
        calculate_per_token_loss=True,
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    router = TopKRouter(config=config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    router.set_layer_number(1)
    torch.manual_seed(0)
    sequences = torch.randn(6, 2, 4)  # of six tokens each
    apart, together = (gradient(router, sequences.split(size, dim=1)) for size in (1, 2))
    return {"gradient of one microbatch of two over two of one (right: 1.0)": round((together / apart).item(), 3)}


def gradient(router: TopKRouter, microbatches: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Norm of the router's gradient through the balancing loss, summed over microbatches."""
    router.zero_grad()
    for tokens in microbatches:
        probs, _ = router(tokens)
        (0.0 * probs.sum()).backward()
    return router.weight.grad.norm()


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
