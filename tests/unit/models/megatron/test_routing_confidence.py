# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The routing confidence is that of the real tokens of a step, in every layout, padded, packed and replayed."""

from typing import Any

import pytest
import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.routing.metrics.router_confidence import chosen_share
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import layout, parallel_job, tiny_batch, tiny_policy
from tests.support.training_run import build_trainer, tiny_trainer
from tests.unit.models.megatron.tiny_trainers import replay_policy, shard_for, with_random_routes

PER_LAYER = {"moe_per_layer_logging": True}


def test_shares_by_hand() -> None:
    logits = torch.tensor([[3.0, 1.0, 0.0], [0.0, 0.0, 0.0]]).log()
    chosen = torch.tensor([[True, False, True], [False, True, True]])
    logits[1] = 0.0
    assert chosen_share(logits, chosen, "softmax").tolist() == pytest.approx([0.75, 2 / 3])
    # Sigmoids: 3 / 4, 1 / 2 and 0.
    assert chosen_share(logits, chosen, "sigmoid").tolist() == pytest.approx([0.6, 2 / 3])
    # Square roots of log 4, log 2 and 0.
    assert chosen_share(logits, chosen, "sqrtsoftplus").tolist() == pytest.approx([2**0.5 / (2**0.5 + 1), 2 / 3])


def measured(policy: PolicyConfig, model: str, replays: bool = False) -> dict[str, float]:
    with tiny_trainer(policy, model) as trainer:
        batch = with_random_routes(tiny_batch(11)) if replays else tiny_batch(11)
        metrics = trainer.train([shard_for(trainer, batch)], sft_loss).moe_metrics
        return {name: value for name, value in metrics.items() if name.startswith("routing_confidence")}


def by_hand(policy: PolicyConfig, model: str) -> list[float]:
    """Return the mean of each layer from the sequences one by one, by the definition, without padding."""
    with parallel_job(policy):
        (chunk,) = build_trainer(policy, model).chunks

        def note(number: int, router: Any, inputs: Any, outputs: Any) -> None:
            logits = (inputs[0] @ router.weight.t().to(inputs[0])).double().flatten(0, -2)
            scores = logits.softmax(-1) if router.score_function == "softmax" else logits.sigmoid()
            chosen = outputs[1]  # a map, or ids
            of_chosen = scores * chosen if chosen.dtype == torch.bool else scores.gather(1, chosen)
            found[number].append(of_chosen.sum(-1) / scores.sum(-1))

        moe_layers = [layer for layer in chunk.decoder.layers if hasattr(layer.mlp, "router")]
        found: list[list[torch.Tensor]] = [[] for _ in moe_layers]
        for number, layer in enumerate(moe_layers):
            layer.mlp.router.register_forward_hook(lambda *call, number=number: note(number, *call))
        batch = tiny_batch(11)
        for ids, length in zip(batch.input_ids, batch.lengths.tolist(), strict=True):
            with torch.no_grad():
                chunk.eval()(ids[None, :length], torch.arange(length)[None], None)
        return [float(torch.cat(of_layer).mean()) for of_layer in found]


@pytest.mark.parametrize("model", ["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.full)])
def test_confidence_is_that_of_real_tokens(model: str) -> None:
    (found,) = run_ranks(measured, 1, tiny_policy(**PER_LAYER), model)
    (expected,) = run_ranks(by_hand, 1, tiny_policy(), model)
    assert found.pop("routing_confidence/mean") == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    assert [*found.values()] == pytest.approx(expected, rel=1e-5)
    assert 0 < min(expected) < max(expected) < 1


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        pytest.param(
            1, {"sequence_packing__enabled": True, "activation_checkpointing": "full"}, marks=pytest.mark.full
        ),
        (2, layout(tp=2)),
        pytest.param(2, layout(pp=2, vpp=2), marks=pytest.mark.full),
        pytest.param(2, layout(ep=2), marks=pytest.mark.full),
    ],
)
def test_every_layout_measures_the_same(world_size: int, changes: dict[str, Any]) -> None:
    (expected,) = run_ranks(measured, 1, tiny_policy(**PER_LAYER), "qwen3_5_moe_text")
    found = run_ranks(measured, world_size, tiny_policy(world_size, **PER_LAYER, **changes), "qwen3_5_moe_text")
    assert found[0].keys() == expected.keys() > {"routing_confidence/mean"}
    assert expected["routing_confidence/mean"] > 0
    assert found[0] == pytest.approx(expected, rel=1e-5)


def test_replayed_experts_have_less_of_the_scores() -> None:
    (own,) = run_ranks(measured, 1, tiny_policy(), "qwen3_moe")
    (replayed,) = run_ranks(measured, 1, replay_policy(), "qwen3_moe", True)
    assert replayed["routing_confidence/mean"] < own["routing_confidence/mean"]
