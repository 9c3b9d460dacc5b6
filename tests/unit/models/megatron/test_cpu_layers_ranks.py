# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The fast modules against the stock ones on two ranks: expert, tensor and pipeline parallelism."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nemo_rl_moe.models.megatron.cpu.moe import GroupedExperts
from nemo_rl_moe.models.megatron.model.releases import clear_auxiliary_losses, recorded_auxiliary_losses
from tests.support.cpu_layers import (
    BATCH,
    SEQUENCE,
    build,
    gradients,
    layout,
    make_config,
    megatron_causal_mask,
    process_groups,
    token_batch,
    train_once,
)
from tests.support.gloo_ranks import run_ranks
from tests.unit.models.megatron.test_cpu_layers_models import assert_same_training

# isort: split
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_layer import MoELayer


def _expert_parallel() -> None:
    with layout(expert=2):
        config = make_config(expert_model_parallel_size=2)
        stock, fast = build(config, fast=False), build(config, fast=True)
        moe = fast.decoder.layers[0].mlp
        assert type(moe) is MoELayer
        assert isinstance(moe.experts, GroupedExperts)
        batch = token_batch()
        # The ranks have different tokens; the all-to-all brings them together.
        batch["input_ids"] = (batch["input_ids"] + 7 * dist.get_rank()) % 45
        expected = train_once(stock, batch, megatron_causal_mask(SEQUENCE))
        actual = train_once(fast, batch)
        assert_same_training(actual, expected)
        # A rank without any token: both routers send everything to the experts of the first rank.
        for model in (stock, fast):
            for layer in model.decoder.layers:
                layer.mlp.router.forward = partial(_first_two_experts, layer.mlp.router)
        assert_same_training(train_once(fast, batch), train_once(stock, batch, megatron_causal_mask(SEQUENCE)))


def _first_two_experts(router: Any, inputs: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Any:
    tokens = inputs.reshape(-1, inputs.size(-1))
    routing_map = torch.zeros(len(tokens), 4, dtype=torch.bool)
    routing_map[:, :2] = True
    logits = tokens @ router.weight.t()
    return logits.softmax(-1) * routing_map, routing_map


def _tensor_parallel() -> None:
    for config in (
        make_config(tensor_model_parallel_size=2, sequence_parallel=True),
        make_config(tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=2),
    ):
        with layout(tensor=2, expert=config.expert_model_parallel_size):
            batch = token_batch()
            expected = train_once(build(config, fast=False), batch, megatron_causal_mask(SEQUENCE))
            fast = build(config, fast=True)
            assert_same_training(train_once(fast, batch), expected)
            assert fast.decoder.layers[0].input_layernorm.weight.sequence_parallel
            assert isinstance(fast.decoder.layers[0].mlp.experts, GroupedExperts)


def _pipeline(virtual: int | None, **changes: Any) -> None:
    with layout(pipeline=2, virtual=virtual):
        config = make_config(
            num_layers=4, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=virtual, **changes
        )
        results = []
        for fast in (False, True):
            stages = range(virtual) if virtual else [None]
            chunks = [build(config, fast=fast, vp_stage=stage).train() for stage in stages]
            clear_auxiliary_losses()
            losses = get_forward_backward_func()(
                forward_step_func=_forward_step,
                data_iterator=[_microbatches() for _ in chunks],
                model=chunks,
                num_microbatches=4,
                seq_length=SEQUENCE,
                micro_batch_size=BATCH,
            )
            grads = {f"{i}.{name}": grad for i, chunk in enumerate(chunks) for name, grad in gradients(chunk).items()}
            auxiliary = {name: values.clone() for name, values in recorded_auxiliary_losses().items()}
            results.append((torch.stack([entry["loss"] for entry in losses] or [torch.zeros(())]), grads, auxiliary))
        assert_same_training(results[1], results[0])


def _microbatches() -> Any:
    for index in range(4):
        batch = token_batch()
        yield batch | {"input_ids": (batch["input_ids"] + index) % 45}


def _forward_step(batches: Any, model: Any) -> Any:
    losses = model(**next(batches), attention_mask=megatron_causal_mask(SEQUENCE))

    def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return output.mean(), {"loss": output.mean().detach().clone()}

    return losses, loss_of


def compare_in_every_layout(store: str) -> None:
    """Runs on both ranks."""
    with process_groups(Path(store), int(os.environ["RANK"]), 2):
        _expert_parallel()
        _tensor_parallel()
        _pipeline(None)
        _pipeline(2, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


@pytest.mark.full
def test_two_ranks_agree_with_stock_modules(tmp_path: Path) -> None:
    run_ranks(compare_in_every_layout, 2, str(tmp_path / "rendezvous"))
