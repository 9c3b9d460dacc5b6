# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The z-loss that is logged is the rank's own.

    python docs/upstream/z_loss_average.py

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
    """Two data-parallel ranks whose routers' logits give z-losses of 1 and 4."""
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=1,
        num_moe_experts=4,
        moe_router_load_balancing_type="none",
        moe_z_loss_coeff=1.0,
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    router = TopKRouter(config=config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    router.set_layer_number(1)
    router.weight.data.fill_(1.0)
    # All logits are x: their log-sum-exp is x + ln 4, and the z-loss its square.
    x = 1.0 + rank - torch.tensor(4.0).log()
    router((x / 4).expand(3, 1, 4))
    reduce_over_ranks("z_loss")
    return {"z_loss that each rank logs (right: 2.5 on both)": round(recorded("z_loss").item(), 3)}


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
