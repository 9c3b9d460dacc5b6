# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A critic with adapters has the values and gradients of peft on transformers' model with a linear head on its hidden
states, and only adapters and head move."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from nemo_rl_moe.algorithms.losses.value import ValueLoss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import TokenBatch, per_token
from nemo_rl_moe.models.hf_files import load_hf_config, plain_config
from nemo_rl_moe.models.interfaces import Head
from nemo_rl_moe.models.megatron.training import megatron_model
from nemo_rl_moe.models.megatron.training.measurements import prefix_values
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from nemo_rl_moe.models.megatron.weights.parameter_layout import parameter_pieces
from tests.support.family_reference import COLUMNS, read_model, write_reference
from tests.support.gloo_ranks import run_ranks
from tests.support.lora_models import Array, Factors, PeftModel, factors_of_ranks, plain_policy, set_random
from tests.support.quick_list import full
from tests.support.tiny_model import forget_recorded_losses, layout, parallel_job, tiny_batch
from tests.unit.models.megatron.tiny_trainers import PACKED, shard_for

TOLERANCE = 1e-5
HEAD = "value_head.weight"
CLIP_RANGE = 0.5


@dataclass(frozen=True)
class Critic:
    """Values of eight sequences before an update, the update's loss and gradients, and the parts that it has moved."""

    values: Array
    loss: float
    gradients: Factors
    moved: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Start:
    """Adapters and head before the update."""

    factors: Factors
    head: Array


def batch_with_returns(vocabulary: int) -> TokenBatch:
    """Sequences whose returns are a function of tokens and places, and whose previous values clip some tokens."""
    batch = tiny_batch(3, vocabulary, shortest=COLUMNS, longest=COLUMNS)
    returns = torch.cos(batch.input_ids.float()) + torch.arange(COLUMNS) / 10
    return batch.with_columns(returns=per_token(returns), previous_values=per_token(0.9 * returns))


def weights_here(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    return {piece.name: piece.local.clone() for piece in parameter_pieces(trainer.chunks, trainer.config)}


def head_gradient(trainer: MegatronTrainer) -> Array | None:
    heads = [chunk.value_head for chunk in trainer.chunks if chunk.has_value_head]
    return heads[0].weight.main_grad.float().numpy().copy() if heads else None


def of_any_rank(mine: Any) -> Any:
    """Return what the first rank with a value holds. Every rank calls it."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return next(each for each in found if each is not None)


def update(policy: PolicyConfig, folder: str) -> tuple[Start, Critic]:
    """Run on every rank: one update of a critic from adapters that show."""
    with parallel_job(policy) as rank:
        if rank == 0 and not Path(folder, "config.json").exists():
            write_reference("qwen3_moe", Path(folder))
        dist.barrier()
        forget_recorded_losses()
        hf_config = plain_config(load_hf_config(folder))
        trainer = MegatronTrainer(policy, hf_config, Path(folder), num_steps=1, heads=(Head.VALUE,))
        set_random(trainer.chunks)
        trainer.optimizer.reload_model_params()
        place, shard = trainer.coordinates, shard_for(trainer, batch_with_returns(hf_config.vocab_size))
        measured = [row.numpy() for of_rows in trainer.measure(shard.microbatches, prefix_values) for row in of_rows]
        rows = {place.data_parallel_rank * (8 // place.data_parallel_size) + n: row for n, row in enumerate(measured)}
        before, factors = weights_here(trainer), factors_of_ranks(trainer.chunks)
        start = Start(factors, of_any_rank(before[HEAD].numpy() if HEAD in before else None))
        loss = trainer.train([shard], ValueLoss(CLIP_RANGE)).global_loss
        gradients = factors_of_ranks(trainer.chunks, gradients=True)
        gradients[HEAD] = of_any_rank(head_gradient(trainer))
        after = weights_here(trainer)
        moved = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
        moved |= {n for n, factor in factors_of_ranks(trainer.chunks).items() if not np.array_equal(factor, factors[n])}
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (rows, moved))
    values = {row: each for of_rank, _ in parts for row, each in of_rank.items()}
    everywhere = frozenset(name for _, of_rank in parts for name in of_rank)
    return start, Critic(np.stack([values[row] for row in range(8)]), loss, gradients, everywhere)


def of_peft(folder: Path, start: Start, scale: float) -> Critic:
    """The same update of peft's adapters on transformers' model, in plain torch."""
    peft = PeftModel(read_model(folder), start.factors, scale)
    head = torch.nn.Parameter(torch.from_numpy(start.head))
    batch = batch_with_returns(peft.model.config.vocab_size)
    hidden = peft.model.get_base_model().model(batch.input_ids).last_hidden_state
    values = torch.nn.functional.pad((hidden @ head.T)[:, :-1, 0], (1, 0))  # a token's value is behind its prefix
    returns, previous = (batch.columns[name].values for name in ("returns", "previous_values"))
    clipped = previous + (values - previous).clamp(-CLIP_RANGE, CLIP_RANGE)
    errors = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
    loss = 0.5 * errors[batch.token_mask].mean()
    loss.backward()
    assert head.grad is not None
    return Critic(values.detach().numpy(), loss.item(), peft.gradients() | {HEAD: head.grad.numpy()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("critic")


def difference(found: Array, expected: Array) -> float:
    return float(np.abs(found - expected).max())


@pytest.mark.parametrize(
    ("experts", "changes"),
    [
        ("per_expert", {}),
        ("per_expert", layout(tp=2) | PACKED),
        full("shared", {}),
        full("none", layout(pp=2) | PACKED),
        full("per_expert", layout(tp=2)),
        full("shared", layout(tp=2, ep=2)),
        full("per_expert", layout(ep=2)),
        full("per_expert", layout(pp=2)),
        full("per_expert", PACKED),
    ],
    ids=str,
)
def test_a_critic_with_adapters_is_as_peft_with_a_head(experts: str, changes: dict[str, Any], folder: Path) -> None:
    world_size = 2 if "sequence_parallel" in changes else 1
    policy = plain_policy(experts, world_size=world_size, **changes)
    assert policy.lora is not None
    start, found = run_ranks(update, world_size, policy, str(folder))[0]
    expected = of_peft(folder, start, policy.lora.scale)
    assert difference(found.values, expected.values) < TOLERANCE
    assert abs(found.loss - expected.loss) < TOLERANCE
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert np.abs(gradient).max() > 10 * TOLERANCE, name  # there is something to compare
    gradients = max(difference(found.gradients[name], each) for name, each in expected.gradients.items())
    print(f"| {experts} | {changes} | {difference(found.values, expected.values):.1e} | {gradients:.1e} |")
    assert gradients < TOLERANCE
    assert found.values.std() > 0.1
    assert_only_adapters_and_head_move(start, found)


def assert_only_adapters_and_head_move(start: Start, found: Critic) -> None:
    assert found.moved == {*start.factors, HEAD}


ADD_ADAPTERS = megatron_model.add_adapters


def with_a_base_that_trains(chunks: Any, *arguments: Any) -> Any:
    switch = ADD_ADAPTERS(chunks, *arguments)
    chunks[0].decoder.layers[0].self_attention.linear_proj.weight.requires_grad_(True)
    return switch


def with_a_frozen_head(chunks: Any, *arguments: Any) -> Any:
    switch = ADD_ADAPTERS(chunks, *arguments)
    chunks[-1].value_head.requires_grad_(False)
    chunks[-1].value_head.weight.main_grad = torch.zeros(())
    return switch


def with_frozen_adapters(chunks: Any, *arguments: Any) -> Any:
    switch = ADD_ADAPTERS(chunks, *arguments)
    for name, parameter in chunks[0].named_parameters():
        if ".lora_" in name:
            parameter.requires_grad_(False)
            parameter.main_grad = torch.zeros_like(parameter)
    return switch


def update_with_fault(fault: Callable[..., Any], policy: PolicyConfig, folder: str) -> tuple[Start, Critic]:
    with mock.patch.object(megatron_model, "add_adapters", fault):
        return update(policy, folder)


@pytest.mark.parametrize("fault", [with_a_base_that_trains, with_a_frozen_head, with_frozen_adapters])
def test_a_part_that_trains_or_not_by_mistake_is_noticed(fault: Callable[..., Any], folder: Path) -> None:
    ((start, found),) = run_ranks(update_with_fault, 1, fault, plain_policy("per_expert"), str(folder))
    with pytest.raises(AssertionError):
        assert_only_adapters_and_head_move(start, found)
