# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""With a padding mask, the sequence-level load balancing loss weighs a row by the square of its length.

    python docs/upstream/seq_aux_loss_lengths.py

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
    """Rows of 3 and 9 tokens, which should weigh the same, and with them a row of padding, which should not count."""
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=1,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=1.0,
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    torch.manual_seed(0)
    router = TopKRouter(config=config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    router.set_layer_number(1)
    rows = torch.randn(9, 3, 4)
    alone = [gradients(router, rows[:, row : row + 1], lengths)[0] for row, lengths in enumerate([[3], [9]])]
    found = {}
    for name, lengths in (("of both rows", [3, 9]), ("with a row of padding", [3, 9, 0])):
        together = gradients(router, rows[:, : len(lengths)], lengths)
        weights = [round((both / one).item(), 3) for both, one in zip(together[:2], alone, strict=True)]
        found[f"weights {name} (right: [0.5, 0.5])"] = weights
    return found


def gradients(router: TopKRouter, rows: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    """Norm of each row's gradient through the balancing loss."""
    rows = rows.clone().requires_grad_()
    padding = torch.arange(9)[:, None] >= torch.tensor(lengths)
    probs, _ = router(rows, padding_mask=padding)
    (0.0 * probs.sum()).backward()
    return list(rows.grad.norm(dim=(0, 2)))


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
