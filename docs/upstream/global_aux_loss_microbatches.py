# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The global-batch load balancing loss divides the counts of all microbatches and ranks by the tokens of one.

    python docs/upstream/global_aux_loss_microbatches.py

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
    """2 and 6 tokens, half of them for either expert: perfect balance, a loss of 1."""
    parallel_state.initialize_model_parallel()
    found = {}
    for name, mask in (("without a padding mask", None), ("with a mask of nothing", False)):
        found[f"ranks of 2 and 6 tokens, {name} (right: [1.0])"] = losses([2 + 4 * rank], mask)
        found[f"microbatches of 2 and 6 tokens, {name} (right: [1.0, 1.0])"] = losses([2, 6], mask)
    return found


def losses(sizes: list[int], mask: bool | None) -> list[float]:
    """The loss of each microbatch of an optimizer step."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=1,
        num_moe_experts=2,
        moe_router_topk=1,
        moe_router_pre_softmax=True,
        moe_router_load_balancing_type="global_aux_loss",
        moe_aux_loss_coeff=1.0,
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    router = TopKRouter(config=config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    router.set_layer_number(1)
    router.weight.data.copy_(torch.eye(2, 4) * 1e-6)
    found = []
    for size in sizes:
        tokens = torch.eye(4)[[0, 1] * (size // 2)][:, None]
        router(tokens, padding_mask=None if mask is None else torch.full((size, 1), mask))
        loss = recorded("global_load_balancing_loss")
        dist.all_reduce(loss)
        found.append(round(loss.item(), 3))
        loss.zero_()
    return found


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
