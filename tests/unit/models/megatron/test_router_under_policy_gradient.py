# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The router under reinforcement learning: where its gradient comes from, and when it stands still."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.models.interfaces import LossInputs, LossOutputs
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import full, slow
from tests.support.tiny_model import MICROBATCHES, layout, parallel_job, tiny_batch, tiny_grpo_policy, tiny_hf_config
from tests.support.training_run import tiny_trainer
from tests.unit.models.megatron.tiny_trainers import (
    ADVANTAGES,
    NUM_LAYERS,
    policy_gradient_loss,
    shard_for,
    with_advantages,
)

COEFFICIENT = 0.05
NO_ADVANTAGES = (0.0,) * 8
Gradients = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Update:
    """What one update is made of."""

    policy: PolicyConfig
    advantages: tuple[float, ...] = NO_ADVANTAGES  # one for each of eight sequences
    folder: str | None = None  # weights; None for random ones
    num_microbatches: int = len(MICROBATCHES)  # of the batch, over all data-parallel ranks
    repeats: bool = False  # four times the same two sequences, side by side in every microbatch
    scales_auxiliary_losses: bool = True  # as Megatron-Core does by the number of microbatches


def policy_for(world_size: int = 1, coefficient: float = 0.0, **changes: Any) -> PolicyConfig:
    fields = {"max_grad_norm": None, "moe_aux_loss_coeff": coefficient, **changes}
    return tiny_grpo_policy(world_size, **fields)


def rl_batch(advantages: tuple[float, ...], seed: int = 3, *, repeats: bool = False) -> TokenBatch:
    batch = tiny_batch(seed)
    return with_advantages(batch.select([0, 1] * 4) if repeats else batch, advantages)


def gradients(update: Update) -> Gradients:
    """Return the gradients that the optimizer's step got, by Megatron-Core's names."""
    with parallel_job(update.policy), ExitStack() as stack:
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        if not update.scales_auxiliary_losses:
            stack.enter_context(mock.patch.object(MoEAuxLossAutoScaler, "set_loss_scale"))
        folder = None if update.folder is None else Path(update.folder)
        trainer = MegatronTrainer(update.policy, tiny_hf_config(), folder, num_steps=10)
        size = 8 // update.num_microbatches
        microbatches = [range(start, start + size) for start in range(0, 8, size)]
        batch = rl_batch(update.advantages, repeats=update.repeats)
        shard = shard_for(trainer, batch, microbatches)
        trainer.train([shard], policy_gradient_loss())
        return {name: parameter.main_grad.numpy().copy() for name, parameter in named_parameters(trainer)}


def named_parameters(trainer: MegatronTrainer) -> Iterator[tuple[str, Any]]:
    (chunk,) = trainer.chunks
    for name, parameter in chunk.named_parameters():
        if parameter.requires_grad:
            yield name, parameter


def of_routers(found: Gradients) -> list[np.ndarray[Any, Any]]:
    return [found[f"decoder.layers.{layer}.mlp.router.weight"] for layer in range(NUM_LAYERS)]


def router_gradients(update: Update, world_size: int = 1) -> list[np.ndarray[Any, Any]]:
    ranks = [of_routers(found) for found in run_ranks(gradients, world_size, update)]
    for rank in ranks[1:]:
        for ours, theirs in zip(ranks[0], rank, strict=True):
            np.testing.assert_array_equal(ours, theirs, "replicas of a router get the same gradient")
    return ranks[0]


def assert_close(
    found: list[np.ndarray[Any, Any]], expected: list[np.ndarray[Any, Any]], tolerance: float = 1e-5
) -> None:
    """Each layer's difference is small beside that layer's largest entry."""
    for ours, theirs in zip(found, expected, strict=True):
        assert np.abs(ours - theirs).max() <= tolerance * np.abs(theirs).max()


@pytest.mark.parametrize("balancing", ["aux_loss", "none"])
def test_without_advantages_and_auxiliary_loss_nothing_has_a_gradient(balancing: str) -> None:
    (found,) = run_ranks(gradients, 1, Update(policy_for(moe_router_load_balancing_type=balancing)))
    assert len(of_routers(found)) == NUM_LAYERS
    assert not any(gradient.any() for gradient in found.values())


def test_each_term_reaches_every_router_and_they_add_up() -> None:
    auxiliary = router_gradients(Update(policy_for(coefficient=COEFFICIENT)))
    learning = router_gradients(Update(policy_for(), ADVANTAGES))
    both = router_gradients(Update(policy_for(coefficient=COEFFICIENT), ADVANTAGES))
    assert all(gradient.any() for gradient in [*auxiliary, *learning])
    assert_close(both, [a + b for a, b in zip(auxiliary, learning, strict=True)])
    twice = router_gradients(Update(policy_for(coefficient=2 * COEFFICIENT)))
    assert_close(twice, [2 * gradient for gradient in auxiliary])


def write_model(folder: str) -> None:
    from transformers import Qwen3MoeForCausalLM

    torch.manual_seed(5)
    Qwen3MoeForCausalLM(tiny_hf_config()).save_pretrained(folder)


def gradients_of_transformers(folder: str) -> list[Any]:
    """Return autograd's gradients of the mean of minus advantage times log-probability; no auxiliary loss."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    batch = rl_batch(ADVANTAGES)
    logits = model(batch.input_ids).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    mask = batch.token_mask[:, 1:]
    (-(logprobs * batch.columns["advantages"].values[:, None])[mask].sum() / mask.sum()).backward()
    return [layer.mlp.gate.weight.grad.numpy() for layer in model.model.layers]


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        slow(1, {}),
        full(1, {"sequence_packing__enabled": True}),
        full(1, {"layer_spec": "local"}),
        slow(2, {}),
        (2, layout(ep=2)),
    ],
)
def test_without_an_auxiliary_loss_the_gradient_is_that_of_the_policy_loss(
    world_size: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = str(tmp_path)
    run_ranks(write_model, 1, folder)
    (expected,) = run_ranks(gradients_of_transformers, 1, folder)
    # The model's own file asks for an auxiliary loss: what the configuration says counts.
    assert tiny_hf_config().router_aux_loss_coef > 0
    found = router_gradients(Update(policy_for(world_size, **changes), ADVANTAGES, folder), world_size)
    assert_close(found, expected, 1e-4)


@pytest.mark.full
@pytest.mark.parametrize("advantages", [slow(NO_ADVANTAGES), ADVANTAGES[:2] * 4], ids=["auxiliary loss alone", "both"])
def test_the_number_of_microbatches_changes_nothing(advantages: tuple[float, ...]) -> None:
    whole = Update(policy_for(coefficient=COEFFICIENT), advantages, num_microbatches=1, repeats=True)
    expected = router_gradients(whole)
    for num_microbatches in (2, 4):
        assert_close(router_gradients(replace(whole, num_microbatches=num_microbatches)), expected)
    two_ranks = replace(whole, policy=policy_for(2, COEFFICIENT), num_microbatches=4)
    assert_close(router_gradients(two_ranks, 2), expected)


def test_the_scale_that_sees_to_it_is_needed() -> None:
    whole = Update(policy_for(coefficient=COEFFICIENT), num_microbatches=1, repeats=True)
    unscaled = replace(whole, num_microbatches=4, scales_auxiliary_losses=False)
    assert_close(router_gradients(unscaled), [4 * gradient for gradient in router_gradients(whole)])


def three_steps(policy: PolicyConfig) -> tuple[dict[str, bool], list[dict[str, float]]]:
    """Return whether each weight is unchanged, to the last bit, and the MoE metrics of each step."""
    with tiny_trainer(policy) as trainer:
        (chunk,) = trainer.chunks
        before = {name: parameter.detach().clone() for name, parameter in chunk.named_parameters()}
        metrics = []
        for step in range(3):
            shard = shard_for(trainer, rl_batch(ADVANTAGES, step))
            metrics.append(trainer.train([shard], checked_loss).moe_metrics)
        return {name: torch.equal(before[name], after) for name, after in chunk.named_parameters()}, metrics


def checked_loss(inputs: LossInputs) -> LossOutputs:
    """The policy loss, of inputs that have something to learn from."""
    assert inputs.columns["advantages"].values.any()
    return policy_gradient_loss()(inputs)


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "changes"),
    [slow(1, {}), (2, {"distributed_data_parallel_config__use_distributed_optimizer": True}), slow(2, layout(ep=2))],
)
@pytest.mark.parametrize("is_frozen", [True, full(False)])
def test_frozen_routers_stay_to_the_last_bit_while_all_else_moves(
    is_frozen: bool, world_size: int, changes: dict[str, Any]
) -> None:
    policy = policy_for(world_size, COEFFICIENT, freeze_moe_router=is_frozen, **changes)
    for stayed, metrics in run_ranks(three_steps, world_size, policy):
        routers = {name for name in stayed if ".router." in name}
        assert len(routers) == NUM_LAYERS
        assert {name for name, is_same in stayed.items() if is_same} == (routers if is_frozen else set())
        assert all("load_balancing_loss" in step for step in metrics), "a frozen router is still watched"
