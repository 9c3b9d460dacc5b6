# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The schedule divides the loss that it is given in place.

    python docs/upstream/loss_in_place.py

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
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

WORLD_SIZE = 1


class Model(MegatronModule):
    """A weight, whose value is the loss."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.tensor(8.0))

    def set_input_tensor(self, tensor) -> None:
        """What a first stage ignores."""

    def forward(self) -> torch.Tensor:
        """The loss."""
        return self.weight * 1.0


def reproduce(rank: int) -> dict[str, object]:
    """Four microbatches, each of the loss 8, which the loss function returns for the logs as well."""
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    found = get_forward_backward_func()(
        forward_step_func=lambda data, model: (model(), lambda loss: (loss, {"loss": loss})),
        data_iterator=None,
        model=[Model(config)],
        num_microbatches=4,
        seq_length=1,
        micro_batch_size=1,
    )
    return {"loss of each microbatch, as logged (right: 8.0)": [part["loss"].item() for part in found]}


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
