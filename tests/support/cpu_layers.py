# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Small models with and without the fast modules, same weights: shared by the tests of CPU layers and replay."""

import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nemo_rl_moe.models.megatron.cpu import cpu_backend  # noqa: F401  (before megatron.core)
from nemo_rl_moe.models.megatron.cpu.spec import FastGPTModel, block_spec
from nemo_rl_moe.models.megatron.layers.router_losses import BatchSize, RouterLosses, SequencesOfTokens
from nemo_rl_moe.models.megatron.model.releases import (
    HAS_MOE_METRICS_TRACKER,
    clear_auxiliary_losses,
    recorded_auxiliary_losses,
)
from nemo_rl_moe.models.megatron.training.router_hooks import cut_of_rank, in_router_order

# isort: split
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig

VOCABULARY, SEQUENCE, BATCH = 45, 12, 3


@contextmanager
def process_groups(store: Path, rank: int = 0, world_size: int = 1) -> Iterator[None]:
    """The default process group over gloo, met at a file."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def layout(tensor: int = 1, expert: int = 1, pipeline: int = 1, virtual: int | None = None) -> Iterator[None]:
    """Megatron's process groups of one layout."""
    parallel_state.initialize_model_parallel(
        tensor, pipeline, virtual, expert_model_parallel_size=expert, expert_tensor_parallel_size=1
    )
    model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    try:
        yield
    finally:
        _forget_auxiliary_losses()
        # A backward pass outside the schedule leaves a scale here with which the schedule would fail.
        MoEAuxLossAutoScaler.main_loss_backward_scale = None
        parallel_state.destroy_model_parallel()


def _forget_auxiliary_losses() -> None:
    """Also forgets how many layers there were: the next model may have more."""
    if HAS_MOE_METRICS_TRACKER:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        get_moe_metrics_tracker().metrics.clear()
    else:
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        get_moe_layer_wise_logging_tracker().clear()


def make_config(**changes: Any) -> TransformerConfig:
    """Two layers of 4 experts, top 2, with auxiliary loss."""
    fields: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 8,
        "ffn_hidden_size": 48,
        "moe_ffn_hidden_size": 24,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.05,
        "moe_token_dispatcher_type": "alltoall",
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "expert_tensor_parallel_size": 1,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "batch_p2p_comm": False,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
    }
    return TransformerConfig(**(fields | changes))


def build(config: TransformerConfig, *, fast: bool, vp_stage: int | None = None, **model_fields: Any) -> GPTModel:
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
    if fast or config.sequence_parallel:
        block = block_spec(config, block, fast=fast)
    model = (FastGPTModel if fast else GPTModel)(
        config=config,
        transformer_layer_spec=block,
        vocab_size=VOCABULARY + VOCABULARY % 2,
        max_sequence_length=64,
        position_embedding_type="rope" if config.mrope_section is None else "mrope",
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        vp_stage=vp_stage,
        **{"share_embeddings_and_output_weights": False, **model_fields},
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_weights(model, name, parameter))
    return model


def _weights(model: GPTModel, name: str, parameter: Tensor) -> Tensor:
    stacked = re.fullmatch(r"(.+\.experts)\.linear_fc([12])_weights", name)
    if stacked:
        names = [f"{stacked[1]}.local_experts.{i}.linear_fc{stacked[2]}.weight" for i in range(len(parameter))]
        return torch.stack([_named_values(model, key, parameter.shape[1:]) for key in names])
    return _named_values(model, name, parameter.shape)


def _named_values(model: GPTModel, name: str, shape: torch.Size) -> Tensor:
    """Random values for a name in which layers and experts are counted over all ranks."""
    name = re.sub(r"layers\.(\d+)", lambda m: f"layers.{model.decoder.layers[int(m[1])].layer_number}", name)
    offset = parallel_state.get_expert_model_parallel_rank() * 2
    name = re.sub(r"local_experts\.(\d+)", lambda m: f"local_experts.{int(m[1]) + offset}", name)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.1 * values
    return values * (0.5 if "router" in name else 0.1)


def gradients(model: GPTModel) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        stacked = re.fullmatch(r"(.+\.experts)\.linear_fc([12])_weights", name)
        if stacked is None:
            found[name] = parameter.grad
            continue
        for expert, grad in enumerate(parameter.grad):
            found[f"{stacked[1]}.local_experts.{expert}.linear_fc{stacked[2]}.weight"] = grad
    return found


def token_batch(batch: int = BATCH, sequence: int = SEQUENCE) -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (batch, sequence + 1), generator=torch.Generator().manual_seed(3))
    return {
        "input_ids": tokens[:, :-1].contiguous(),
        "position_ids": torch.arange(sequence).expand(batch, -1),
        "labels": tokens[:, 1:].contiguous(),
    }


def megatron_causal_mask(sequence: int) -> Tensor:
    """True where a query must not look, as Megatron's own attention wants it."""
    return torch.ones(sequence, sequence, dtype=torch.bool).triu_(1)[None, None]


def train_once(
    model: GPTModel, batch: dict[str, Tensor], attention_mask: Tensor | None = None, **inputs: Any
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Losses `[batch, sequence]`, gradients of their mean, and the recorded auxiliary losses by layer."""
    clear_auxiliary_losses()
    model.train().zero_grad(set_to_none=True)
    _attach_router_losses(model, batch["labels"], inputs.get("padding_mask"))
    losses = model(**batch, attention_mask=attention_mask, **inputs)
    losses.mean().backward()
    auxiliary = {name: values.clone() for name, values in recorded_auxiliary_losses().items()}
    return losses.detach(), gradients(model), auxiliary


def _attach_router_losses(model: GPTModel, labels: Tensor, padding_mask: Tensor | None) -> None:
    """Give the routers the losses of one microbatch, each row a sequence; padding stands behind it."""
    losses = RouterLosses([model], model.config)
    sequence = torch.arange(len(labels))[:, None].expand_as(labels)
    if padding_mask is not None:
        sequence = sequence.where(~padding_mask, -1)
    num_sequences = int((sequence >= 0).any(1).sum())
    losses.update = losses.step = BatchSize(int((sequence >= 0).sum()), num_sequences, num_microbatches=1)
    losses.set_tokens(0, SequencesOfTokens.of(in_router_order(sequence, cut_of_rank(model.config)), len(labels)))


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], atol: float, rtol: float = 1e-5) -> None:
    """Same names, and values within the tolerance, which grows with a tensor's largest value."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        scaled = atol * max(1.0, value.abs().max().item())
        torch.testing.assert_close(actual[name], value, atol=scaled, rtol=rtol, msg=lambda text, n=name: f"{n}: {text}")
