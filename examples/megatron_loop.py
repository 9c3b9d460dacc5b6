# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""MoE metrics in a loop over Megatron-Core alone: `torchrun --nproc-per-node 2 examples/megatron_loop.py`."""

import torch
import torch.distributed as dist

# On CPUs this import must precede megatron.core.
from nemo_rl_moe.models.megatron.moe_metrics import get_moe_metrics  # isort: skip
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_config import TransformerConfig

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
tensor_parallel.model_parallel_cuda_manual_seed(0)
config = TransformerConfig(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    add_bias_linear=False,
    num_moe_experts=8,
    moe_router_topk=2,
    moe_layer_freq=2,  # layers 0 and 2 have experts
    moe_aux_loss_coeff=0.01,
    moe_z_loss_coeff=0.001,
    expert_model_parallel_size=2,
)
layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
model = GPTModel(config, layers, vocab_size=128, max_sequence_length=64).to(device)
positions = torch.arange(64, device=device).expand(2, 64)
future = torch.ones(1, 1, 64, 64, dtype=torch.bool, device=device).triu(1)

num_microbatches = 2
total_loss_dict: dict[str, float] = {}
for step in range(3):
    for _ in range(num_microbatches):
        tokens = torch.randint(0, 128, (2, 64), device=device)
        model(tokens, positions, future, labels=tokens).mean().backward()
    metrics = get_moe_metrics(1 / num_microbatches, total_loss_dict, per_layer_logging=True)
    if dist.get_rank() == 0:
        print(f"step {step}: {metrics}")
