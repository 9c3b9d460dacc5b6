# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Which tokens Clip-Cov and KL-Cov select, and that a step selects them before its updates."""

import pytest
import torch

from nemo_rl_moe.algorithms.grpo_batch import with_selected_tokens
from nemo_rl_moe.algorithms.losses.policy_gradient import SELECTED_TOKENS, PolicyGradientLoss
from nemo_rl_moe.distributed.batch import TokenBatch, per_sequence, per_token
from nemo_rl_moe.rl.objectives.covariance import covariances, select_clipped, select_penalised
from tests.support.grpo_fakes import small_config
from tests.unit.algorithms.policy_loss_reference import config_of, inputs_of
from tests.unit.algorithms.test_grpo_loop import Loop

LOGPROBS = torch.tensor([[-1.0, -2.0, -9.0], [-3.0, -2.0, -9.0]], dtype=torch.float64)
ADVANTAGES = torch.tensor([[2.0, 2.0, 9.0], [-2.0, -2.0, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False], [True, True, False]])
TWO_UPDATES = ("grpo.max_num_steps=1", "policy.train_micro_batch_size=1", "policy.train_global_batch_size=2")


def test_covariances_by_hand() -> None:
    # Means: -2 and 0.
    assert covariances(LOGPROBS[MASK], ADVANTAGES[MASK]).tolist() == [2.0, 0.0, 2.0, 0.0]


def test_the_largest_are_penalised_and_at_least_one() -> None:
    def selected(share: float) -> list[list[bool]]:
        generator = torch.Generator()
        found = select_penalised(LOGPROBS, ADVANTAGES * 1.0, MASK, config_of(cov_ratio=share), generator)
        return found.tolist()

    nothing = [False, False, False]
    assert selected(0.5) == [[True, False, False], [True, False, False]]
    assert selected(0.01) == [[True, False, False], nothing]
    assert selected(1.0) == MASK.tolist()


def test_random_tokens_between_the_bounds_are_clipped() -> None:
    generator = torch.Generator().manual_seed(3)
    logprobs, advantages = (torch.randn(20, 30, generator=generator) for _ in range(2))
    mask = torch.rand(20, 30, generator=generator) < 0.8
    config = config_of(cov_ratio=0.05, clip_cov_min=0.5, clip_cov_max=1.5)

    def selected(seed: int) -> torch.Tensor:
        return select_clipped(logprobs, advantages, mask, config, torch.Generator().manual_seed(seed))

    found = selected(0)
    assert int(found.sum()) == int(0.05 * int(mask.sum()))
    assert not (found & ~mask).any()
    of_all = torch.zeros(20, 30, dtype=torch.float64)
    of_all[mask] = covariances(logprobs[mask], advantages[mask])
    assert of_all[found].min() > 0.5
    assert of_all[found].max() < 1.5
    assert torch.equal(found, selected(0))
    assert not torch.equal(found, selected(1))
    none = select_clipped(logprobs, advantages, mask, config_of(clip_cov_min=90.0, clip_cov_max=91.0), generator)
    assert not none.any()


def test_rounding_is_not_penalised() -> None:
    """In the first update of a step the old log-probabilities are those of another pass of the same weights."""
    logprobs = torch.tensor([[-1.0, -1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.0 + 5e-6, -1.0 - 5e-6, -1.0 - 2e-5]], dtype=torch.float64)
    none = torch.zeros(1, dtype=torch.float64)
    columns = {"prev_logprobs": old, "generation_logprobs": old, SELECTED_TOKENS: torch.ones(1, 3)}
    inputs = inputs_of(logprobs, torch.ones(1, 3, dtype=torch.bool), advantages=none, **columns)
    loss = PolicyGradientLoss(config_of(objective="kl_cov", kl_cov_coef=6.0), prev_is_current=False)(inputs).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient.tolist() == [[0.0, 0.0, 2.0]]


def batch_of() -> TokenBatch:
    columns = {"prev_logprobs": per_token(LOGPROBS), "advantages": per_sequence(ADVANTAGES[:, 0])}
    ids = torch.zeros(2, 3, dtype=torch.long)
    return TokenBatch(ids, torch.tensor([3, 3]), MASK, ("one", "other"), columns)


def test_a_batch_gets_its_tokens_and_their_share() -> None:
    config = small_config("loss_fn.objective=kl_cov", "loss_fn.cov_ratio=0.5", *TWO_UPDATES)
    batch, metrics = with_selected_tokens(config, batch_of(), step=1)
    assert batch.columns[SELECTED_TOKENS].values.tolist() == [[True, False, False], [True, False, False]]
    assert metrics == {"selected_token_fraction": 0.5}
    plain, nothing = with_selected_tokens(small_config(), batch_of(), step=1)
    assert (set(plain.columns), nothing) == ({"prev_logprobs", "advantages"}, {})


def test_each_step_selects_others() -> None:
    """By the seed of the run and the step, so that a resumed run selects the same."""
    keys = ("loss_fn.objective=clip_cov", "loss_fn.cov_ratio=0.3", "loss_fn.clip_cov_max=3.0")

    def selected(step: int, *more: str) -> list[list[bool]]:
        batch, _ = with_selected_tokens(small_config(*keys, *more), batch_of(), step)
        found: list[list[bool]] = batch.columns[SELECTED_TOKENS].values.tolist()
        return found

    assert selected(1) == selected(1)
    assert len({str(selected(step)) for step in range(10)}) > 1
    assert len({str(selected(1, f"grpo.seed={seed}")) for seed in range(10)}) > 1


@pytest.mark.parametrize("objective", ["clip_cov", "kl_cov"])
def test_a_step_computes_the_log_probabilities_and_trains_on_the_selection(objective: str) -> None:
    loop = Loop(small_config(f"loss_fn.objective={objective}", *TWO_UPDATES))
    assert loop.diary.index("logprobs") < loop.diary.index("train")
    (batch,) = loop.policy.batches
    assert batch.columns[SELECTED_TOKENS].values.shape == batch.token_mask.shape
    assert "train/selected_token_fraction" in loop.logger.records[-1][1]


def test_one_update_a_step_has_the_pass_too() -> None:
    loop = Loop(small_config("loss_fn.objective=clip_cov", "grpo.max_num_steps=1"))
    assert loop.diary.count("logprobs") == 1
    assert "logprobs" not in Loop(small_config("grpo.max_num_steps=1")).diary
