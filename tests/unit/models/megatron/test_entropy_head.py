# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A loss that needs the entropy: exact, with its gradient, in every layout; one that does not pays nothing."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.metrics import Reduction
from nemo_rl_moe.models.interfaces import Head, LossInputs, LossOutputs, needs_of
from nemo_rl_moe.models.megatron.training.token_statistics import vocabulary_entropy
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import full, slow
from tests.support.tiny_model import layout, tiny_batch, tiny_policy
from tests.support.training_run import tiny_trainer
from tests.unit.models.megatron.tiny_trainers import CHUNKED, PACKED, shard_for

# Not a multiple of 2: with tensor parallelism a row of the vocabulary is padding.
MODEL = {"vocab_size": 61}


class EntropyBonus:
    """Log-likelihood and entropy of the trained tokens, both maximised."""

    needs = (Head.ENTROPY,)

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        assert inputs.entropy is not None
        mask, count = inputs.token_mask, inputs.global_valid_tokens
        entropy = inputs.entropy.where(mask, 0.0).sum() / count
        loss = -inputs.logprobs.where(mask, 0.0).sum() / count - 0.5 * entropy
        return LossOutputs(loss, {"entropy": (entropy.detach(), Reduction.SHARE)})


def likelihood(inputs: LossInputs) -> LossOutputs:
    """A loss that declares nothing."""
    assert inputs.entropy is None
    return LossOutputs(-inputs.logprobs.where(inputs.token_mask, 0.0).sum() / inputs.global_valid_tokens, {})


def test_log_probabilities_are_always_needed() -> None:
    assert needs_of(likelihood) == {Head.LOGPROBS}
    assert needs_of(EntropyBonus()) == {Head.LOGPROBS, Head.ENTROPY}


def entropy_and_gradient() -> tuple[Any, ...]:
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(3, 4, 17, generator=generator) * 5).requires_grad_()
    masked = logits.masked_fill(torch.arange(17) == 16, torch.finfo(torch.float32).min)
    weights = torch.randn(3, 4, generator=generator)
    ours = vocabulary_entropy(masked, dist.group.WORLD)
    (ours * weights).sum().backward()
    gradient, logits.grad = logits.grad, None
    probabilities: Tensor = logits[..., :16].double().softmax(-1)
    theirs = -(probabilities * probabilities.log()).sum(-1)
    (theirs * weights).sum().backward()
    assert gradient is not None
    assert logits.grad is not None
    return ours.detach().numpy(), theirs.detach().numpy(), gradient.numpy(), logits.grad.numpy()


def test_entropy_and_its_gradient_are_those_of_float64() -> None:
    ((ours, theirs, gradient, expected),) = run_ranks(entropy_and_gradient, 1)
    np.testing.assert_allclose(ours, theirs, atol=2e-6)
    np.testing.assert_allclose(gradient, expected, atol=2e-6)


def trained(policy: PolicyConfig) -> tuple[float, float, float, float]:
    with tiny_trainer(policy, MODEL) as trainer:
        batch = tiny_batch(3, vocabulary_size=61)
        shard = shard_for(trainer, batch)
        evaluated = trainer.evaluate(shard, EntropyBonus())
        result = trainer.train([shard], EntropyBonus())
        plain = trainer.train([shard], likelihood)
        assert all(chunk.entropy is None for chunk in trainer.chunks)
        shares = [series["entropy"].reduce() if series else 0.0 for series in (evaluated, result.microbatch_metrics)]
        return *shares, result.grad_norm, plain.grad_norm  # type: ignore[return-value]


def joined(world_size: int, **changes: Any) -> tuple[float, float, float, float]:
    found = run_ranks(trained, world_size, tiny_policy(world_size, **changes))
    shares = {entry[:2] for entry in found} - {(0.0, 0.0)}
    return sum(share[0] for share in shares), sum(share[1] for share in shares), *found[0][2:]


@pytest.fixture(scope="module")
def expected() -> tuple[float, float, float, float]:
    return joined(1)


def test_evaluation_and_training_measure_the_same(expected: tuple[float, ...]) -> None:
    assert expected[0] == pytest.approx(expected[1], rel=1e-6)
    assert 1 < expected[0] < np.log(61)


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        full(1, PACKED),
        *(full(2, changes) for changes in (layout(tp=2), layout(tp=2) | CHUNKED, layout(pp=2, vpp=2), layout(ep=2))),
        *(slow(2, changes) for changes in ({}, layout(pp=2))),
        (2, layout(pp=2, vpp=2) | PACKED | CHUNKED),
    ],
)
def test_layouts_agree(world_size: int, changes: dict[str, Any], expected: tuple[float, ...]) -> None:
    assert joined(world_size, **changes) == pytest.approx(expected, rel=1e-4)
