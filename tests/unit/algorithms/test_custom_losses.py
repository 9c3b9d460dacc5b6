# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Losses of other trainers as custom objectives, with values and gradients by hand in float64."""

import math

import pytest
import torch

from nemo_rl_moe.algorithms.losses.custom_objective import check_objective
from nemo_rl_moe.algorithms.losses.policy_gradient import PolicyGradientLoss
from nemo_rl_moe.rl.objectives import ObjectiveInputs
from tests.unit.algorithms.policy_loss_reference import config_of, inputs_of, random_inputs

LOWEST, HIGHEST, KL_WEIGHT = math.log(0.5), math.log(2.0), 0.1


def masked_with_kl(tokens: ObjectiveInputs) -> torch.Tensor:
    """Loss of prime-rl: a mask of the ratio of training to generation, and the square of its logarithm."""
    log_ratio = tokens.logprobs - tokens.generation_logprobs
    kept = (log_ratio.detach() > LOWEST) & (log_ratio.detach() < HIGHEST)
    policy = -log_ratio.exp() * tokens.advantages
    return policy.where(kept, 0.0) + KL_WEIGHT * log_ratio.square()


def truncated_sampling(tokens: ObjectiveInputs) -> torch.Tensor:
    """PPO's surrogate, weighed by the old policy over generation, truncated at 2."""
    weights = (tokens.prev_logprobs - tokens.generation_logprobs).exp().clamp(max=2.0)
    clipped = tokens.ratio.clamp(1 - tokens.config.ratio_clip_min, 1 + tokens.config.ratio_clip_max)
    surrogate = torch.minimum(tokens.ratio * tokens.advantages, clipped * tokens.advantages)
    return -weights * surrogate


def test_ratio_masked_by_bounds_with_a_squared_divergence() -> None:
    # Ratios of training to generation 1.5, 4 and 0.25 (both masked) and 1; the last target does not count.
    ratios = torch.tensor([[1.5, 4.0, 9.0], [0.25, 1.0, 9.0]], dtype=torch.float64)
    generation = torch.full((2, 3), 0.1, dtype=torch.float64).log()
    mask = torch.tensor([[True, True, False], [True, True, False]])
    logprobs = (generation + ratios.log()).requires_grad_()
    inputs = inputs_of(
        logprobs, mask, advantages=torch.tensor([2.0, -1.0], dtype=torch.float64), generation_logprobs=generation
    )
    outputs = PolicyGradientLoss(config_of(objective=f"{__name__}:masked_with_kl"), prev_is_current=True)(inputs)
    (gradient,) = torch.autograd.grad(outputs.loss, logprobs)
    logs = [math.log(value) for value in (1.5, 4.0, 0.25, 1.0)]
    losses = [-1.5 * 2.0 + 0.1 * logs[0] ** 2, 0.1 * logs[1] ** 2, 0.1 * logs[2] ** 2, 1.0]
    assert outputs.loss.item() == pytest.approx(sum(losses) / 4, rel=1e-12)
    # d/dx of -exp(x) A is itself, of 0.1 x^2 it is 0.2 x; a masked token keeps the second alone.
    by_hand = [[-3.0 + 0.2 * logs[0], 0.2 * logs[1], 0.0], [0.2 * logs[2], 1.0, 0.0]]
    expected = torch.tensor(by_hand, dtype=torch.float64) / 4
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)


def test_truncated_importance_sampling_by_hand() -> None:
    # Old over generation 3 (truncated to 2), 0.5, 1; new over old 1.1, 2 (clipped at 1.3), 0.5.
    of_old = torch.tensor([[3.0, 0.5, 1.0]], dtype=torch.float64)
    of_new = torch.tensor([[1.1, 2.0, 0.5]], dtype=torch.float64)
    generation = torch.full((1, 3), 0.1, dtype=torch.float64).log()
    prev = generation + of_old.log()
    logprobs = (prev + of_new.log()).requires_grad_()
    inputs = inputs_of(
        logprobs,
        torch.ones(1, 3, dtype=torch.bool),
        advantages=torch.tensor([2.0], dtype=torch.float64),
        generation_logprobs=generation,
        prev_logprobs=prev,
    )
    outputs = PolicyGradientLoss(config_of(objective=f"{__name__}:truncated_sampling"), prev_is_current=False)(inputs)
    (gradient,) = torch.autograd.grad(outputs.loss, logprobs)
    assert outputs.loss.item() == pytest.approx(-(2 * 1.1 * 2 + 0.5 * 1.3 * 2 + 1 * 0.5 * 2) / 3, rel=1e-12)
    expected = -torch.tensor([[2 * 1.1 * 2, 0.0, 0.5 * 2]], dtype=torch.float64) / 3
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("token_level_loss", [True, False])
def test_it_equals_the_built_in_correction(token_level_loss: bool) -> None:
    averaging = {"token_level_loss": token_level_loss, "ratio_clip_c": None}
    built_in = config_of(importance_sampling_correction="truncated", importance_sampling_ratio_max=2.0, **averaging)
    custom = config_of(objective=f"{__name__}:truncated_sampling", **averaging)
    inputs = random_inputs(seed=7)
    expected, found = (PolicyGradientLoss(config, prev_is_current=False)(inputs).loss for config in (built_in, custom))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(loss, inputs.logprobs)[0] for loss in (expected, found)]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-15)


def sees_everything(tokens: ObjectiveInputs) -> torch.Tensor:
    assert tokens.reference_logprobs is not None
    assert tokens.weights.shape == tokens.reference_logprobs.shape == tokens.prev_logprobs.shape
    assert tokens.global_valid_tokens >= int(tokens.mask.sum())
    assert tokens.global_sequences >= int(tokens.mask.any(dim=1).sum())
    return -tokens.advantages * tokens.logprobs


def test_an_objective_sees_what_the_built_in_ones_read() -> None:
    config = config_of(objective=f"{__name__}:sees_everything", reference_policy_kl_penalty=0.1)
    check_objective(config)
    assert PolicyGradientLoss(config, prev_is_current=False)(random_inputs(seed=8)).loss.isfinite()
    for name in ("masked_with_kl", "truncated_sampling"):
        check_objective(config_of(objective=f"{__name__}:{name}"))
