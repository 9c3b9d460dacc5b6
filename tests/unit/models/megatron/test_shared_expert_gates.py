# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The mean gate of shared experts is that of the real tokens of a step, in every layout, padded and packed."""

from typing import Any

import pytest
import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import layout, parallel_job, tiny_batch, tiny_policy
from tests.support.training_run import build_trainer, tiny_trainer
from tests.unit.models.megatron.tiny_trainers import shard_for

PER_LAYER = {"moe_per_layer_logging": True}
LAYERS = range(4)


def gates_of_step(policy: PolicyConfig, model: str) -> dict[str, float]:
    with tiny_trainer(policy, model) as trainer:
        # A gate of 0 for every token would be 1 / 2 whatever was counted.
        with torch.no_grad():
            for chunk in trainer.chunks:
                for name, parameter in chunk.named_parameters():
                    if name.endswith("gate_weight"):
                        parameter.fill_(0.3)
        shard = shard_for(trainer, tiny_batch(11))
        metrics = trainer.train([shard], sft_loss).moe_metrics
        return {name: value for name, value in metrics.items() if name.startswith("shared_expert_gate")}


def gates_by_hand(policy: PolicyConfig) -> list[float]:
    """Return the mean of each layer from the sequences one by one, without padding."""
    with parallel_job(policy):
        (chunk,) = build_trainer(policy, "qwen2_moe").chunks
        found: list[list[torch.Tensor]] = [[] for _ in chunk.decoder.layers]
        for number, layer in enumerate(chunk.decoder.layers):
            weight = layer.mlp.shared_experts.gate_weight
            with torch.no_grad():
                weight.fill_(0.3)
            layer.mlp.register_forward_pre_hook(
                lambda _, inputs, number=number, weight=weight: found[number].append((inputs[0] @ weight.t()).sigmoid())
            )
        batch = tiny_batch(11)
        for ids, length in zip(batch.input_ids, batch.lengths.tolist(), strict=True):
            with torch.no_grad():
                chunk.eval()(ids[None, :length], torch.arange(length)[None], None)
        return [float(torch.cat([gates.flatten() for gates in of_layer]).mean()) for of_layer in found]


def test_gates_are_those_of_real_tokens() -> None:
    ((found,), (expected,)) = (
        run_ranks(function, 1, *arguments)
        for function, arguments in (
            (gates_of_step, (tiny_policy(**PER_LAYER), "qwen2_moe")),
            (gates_by_hand, (tiny_policy(),)),
        )
    )
    assert found.pop("shared_expert_gate/mean") == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    assert [*found.values()] == pytest.approx(expected, rel=1e-5)
    assert max(expected) - min(expected) > 1e-3


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        (1, {"sequence_packing__enabled": True, "activation_checkpointing": "full"}),
        (2, layout(tp=2)),
        (2, layout(pp=2, vpp=2)),
        (2, layout(ep=2)),
    ],
)
def test_every_layout_measures_the_same(world_size: int, changes: dict[str, Any]) -> None:
    (expected,) = run_ranks(gates_of_step, 1, tiny_policy(**PER_LAYER), "qwen3_5_moe_text")
    found = run_ranks(gates_of_step, world_size, tiny_policy(world_size, **PER_LAYER, **changes), "qwen3_5_moe_text")
    assert found[0].keys() == {"shared_expert_gate/mean", *(f"shared_expert_gate/mean_layer_{n}" for n in LAYERS)}
    assert found[0] == pytest.approx(expected, rel=1e-4)


def test_a_model_without_a_gate_has_no_such_metric() -> None:
    assert run_ranks(gates_of_step, 1, tiny_policy(), "deepseek_v3") == [{}]
