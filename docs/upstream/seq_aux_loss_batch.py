# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The gradient of the sequence-level balancing loss depends on how many sequences a microbatch has.

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

TOKENS, SEQUENCES = 8, 4


def gradient(sequences_a_microbatch: int) -> float:
    """Norm of the router's gradient of the balancing loss alone, as a training step with a loss per token scales it."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=1,
        num_moe_experts=4,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=1.0,
        calculate_per_token_loss=True,
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    router = TopKRouter(config=config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    router.set_layer_number(1)
    torch.manual_seed(0)
    router.weight.data.normal_()
    hidden = torch.randn(TOKENS, SEQUENCES, 4)
    for microbatch in hidden.split(sequences_a_microbatch, dim=1):
        probs, _ = router(microbatch.contiguous())
        (0.0 * probs.sum()).backward()
    # Megatron-Core divides all gradients by the tokens of the step.
    return (router.weight.grad / (TOKENS * SEQUENCES)).norm().item()


def reproduce() -> None:
    """Print the gradient of a step of four sequences, one and two and four in a microbatch."""
    parallel_state.initialize_model_parallel()
    found = [gradient(size) for size in (1, 2, 4)]
    print("megatron-core", version("megatron-core"))
    shown = ", ".join(f"{value / found[0]:.3f}" for value in found)
    print(f"gradient with 1, 2 and 4 sequences in a microbatch, over that with 1 (right: 1.000, 1.000, 1.000): {shown}")


class OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU where Megatron-Core's code says "cuda"."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Calls the function with another device."""
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        with OnCpu():
            reproduce()
        dist.destroy_process_group()
