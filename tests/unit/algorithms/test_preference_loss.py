# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The preference loss equals numbers worked by hand, a second writing of it, and itself however the batch is cut."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_rl_moe.algorithms.losses.supervised import PreferenceLoss, preference_losses
from nemo_rl_moe.config.schema import PreferenceLossConfig
from nemo_rl_moe.data.preferences import REFERENCE_SUMS
from nemo_rl_moe.metrics import MetricSeries, Reduction, concatenate
from nemo_rl_moe.models.interfaces import LossInputs
from tests.support.quick_list import examples
from tests.unit.algorithms.preference_reference import config_of, inputs_of, random_pairs, reference_losses

PAIRS, TARGETS = 5, 6

configurations = st.one_of(
    st.builds(config_of, label_smoothing=st.sampled_from([0.0, 0.2])),
    st.builds(config_of, preference_loss_type=st.just("robust"), label_smoothing=st.sampled_from([0.1, 0.3])),
    st.builds(config_of, preference_loss_type=st.sampled_from(["ipo", "hinge", "apo_zero", "apo_down"])),
).flatmap(
    lambda config: st.builds(
        lambda **changes: config.model_copy(update=changes),
        reference_policy_kl_penalty=st.sampled_from([0.1, 0.5]),
        preference_average_log_probs=st.booleans(),
        preference_loss_weight=st.sampled_from([1.0, 0.3]),
        sft_loss_weight=st.sampled_from([0.0, 0.7]),
        sft_average_log_probs=st.booleans(),
    )
)


def two_pairs() -> LossInputs:
    """Response log-probabilities -3, -4 (two tokens, one token) and -1, -2; of the reference -5, -4 and -1.5, -1."""
    nan = float("nan")
    logprobs = torch.tensor([[-1.0, -2.0], [nan, -4.0], [-1.0, nan], [-0.5, -1.5]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [False, True], [True, False], [True, True]])
    reference = torch.tensor([-5.0, -4.0, -1.5, -1.0], dtype=torch.float64)
    return inputs_of(logprobs.requires_grad_(), mask, reference)


def softplus(value: float) -> float:
    return math.log1p(math.exp(value))


def metrics_of(inputs: LossInputs, config: PreferenceLossConfig) -> dict[str, float]:
    outputs = PreferenceLoss(config)(inputs)
    return {name: float(value) for name, (value, _) in outputs.metrics.items()} | {"loss": outputs.loss.item()}


def test_dpo_by_hand() -> None:
    # Ratios 2, 0 and 0.5, -1: margins 0.5 x 2 = 1 and 0.5 x 1.5 = 0.75.
    found = metrics_of(two_pairs(), config_of(reference_policy_kl_penalty=0.5, sft_loss_weight=0.1))
    preference, sft = (softplus(-1.0) + softplus(-0.75)) / 2, (3 + 1) / 2
    assert found == pytest.approx(
        {
            "loss": preference + 0.1 * sft,
            "preference_loss": preference,
            "sft_loss": sft,
            "accuracy": 1.0,
            "rewards_chosen_mean": (1.0 + 0.25) / 2,
            "rewards_rejected_mean": (0.0 - 0.5) / 2,
            "reward_margin": (1.0 + 0.75) / 2,
            "logprobs_chosen_mean": -2.0,
            "logprobs_rejected_mean": -3.0,
            "num_valid_pairs": 2,
            "num_valid_tokens": 6,
        },
        rel=1e-12,
    )


def test_averages_smoothing_and_ipo_by_hand() -> None:
    # Per token: ratios 2 / 2, 0 / 1 and 0.5 / 1, -1 / 2; margins 1 and 1 before beta.
    averaged = config_of(
        reference_policy_kl_penalty=0.5,
        preference_average_log_probs=True,
        label_smoothing=0.1,
        sft_average_log_probs=True,
    )
    found = metrics_of(two_pairs(), averaged)
    assert found["preference_loss"] == pytest.approx(0.9 * softplus(-0.5) + 0.1 * softplus(0.5), rel=1e-12)
    assert found["sft_loss"] == pytest.approx((1.5 + 1.0) / 2, rel=1e-12)
    ipo = metrics_of(two_pairs(), config_of(preference_loss_type="ipo", reference_policy_kl_penalty=0.25))
    assert ipo["preference_loss"] == pytest.approx(((2 - 2) ** 2 + (1.5 - 2) ** 2) / 2, rel=1e-12)
    assert ipo["reward_margin"] == pytest.approx(0.25 * (2 + 1.5) / 2, rel=1e-12)


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


@pytest.mark.parametrize(
    ("kind", "smoothing", "losses"),
    [
        # Rewards 1, 0 and 0.25, -0.5: margins 1 and 0.75.
        ("hinge", 0.0, [0.0, 0.25]),
        ("apo_zero", 0.0, [1 - sigmoid(1.0) + 0.5, 1 - sigmoid(0.25) + sigmoid(-0.5)]),
        ("apo_down", 0.0, [sigmoid(1.0) + 1 - sigmoid(1.0), sigmoid(0.25) + 1 - sigmoid(0.75)]),
        ("robust", 0.25, [(0.75 * softplus(-m) - 0.25 * softplus(m)) / 0.5 for m in (1.0, 0.75)]),
    ],
)
def test_other_losses_by_hand(kind: str, smoothing: float, losses: list[float]) -> None:
    config = config_of(preference_loss_type=kind, label_smoothing=smoothing, reference_policy_kl_penalty=0.5)
    assert metrics_of(two_pairs(), config)["preference_loss"] == pytest.approx(sum(losses) / 2, rel=1e-12)


def test_robust_is_right_on_average_over_wrong_labels() -> None:
    """A share e of the labels flipped: the mean over both is DPO's loss on the right ones, which sigmoid's is not."""
    chosen, rejected = torch.tensor([1.3], dtype=torch.float64), torch.tensor([-0.4], dtype=torch.float64)
    right = preference_losses(chosen, rejected, config_of())
    expected = {}
    for kind in ("robust", "sigmoid"):
        config = config_of(preference_loss_type=kind, label_smoothing=0.2)
        of_right, of_wrong = preference_losses(chosen, rejected, config), preference_losses(rejected, chosen, config)
        expected[kind] = 0.8 * of_right + 0.2 * of_wrong
    torch.testing.assert_close(expected["robust"], right, rtol=1e-12, atol=0)
    assert abs(expected["sigmoid"] - right) > 0.1


def test_equal_rewards_are_not_right() -> None:
    inputs = two_pairs()
    sums = inputs.logprobs.detach().where(inputs.token_mask, 0.0).sum(dim=1)
    found = metrics_of(inputs_of(inputs.logprobs, inputs.token_mask, sums), config_of())
    assert found["accuracy"] == 0.0
    assert found["preference_loss"] == pytest.approx(math.log(2))


@settings(deadline=None, max_examples=examples(100))
@given(config=configurations, seed=st.integers(0, 1000))
def test_equals_a_second_writing_of_it_and_its_gradient(config: PreferenceLossConfig, seed: int) -> None:
    inputs = random_pairs(seed, PAIRS, TARGETS)
    expected = reference_losses(inputs, config)
    outputs = PreferenceLoss(config)(inputs)
    assert outputs.loss.dtype == torch.float64
    assert outputs.loss.item() == pytest.approx(expected["loss"].item(), rel=1e-10)
    for name in expected.keys() - {"loss"}:
        value, reduction = outputs.metrics[name]
        assert reduction is Reduction.SEQUENCE_SHARE
        assert value.item() == pytest.approx(expected[name], rel=1e-10, abs=1e-14)
    (gradient,) = torch.autograd.grad(outputs.loss, inputs.logprobs)
    (wanted,) = torch.autograd.grad(expected["loss"], inputs.logprobs)
    torch.testing.assert_close(gradient, wanted, rtol=1e-8, atol=1e-12)
    assert not gradient[~inputs.token_mask].any()


@st.composite
def cuts(draw: st.DrawFn) -> list[list[int]]:
    """Microbatches of pairs, which hold every pair once."""
    order = draw(st.permutations(range(PAIRS)))
    edges = sorted(draw(st.sets(st.integers(1, PAIRS - 1))))
    return [list(order[a:b]) for a, b in zip([0, *edges], [*edges, PAIRS], strict=True)]


def part(whole: LossInputs, logprobs: Tensor, pairs: Sequence[int], padding: int, fillers: int) -> LossInputs:
    """Some pairs of the batch, with columns of padding, and pairs at the end that only fill up."""
    rows = [row for pair in [*pairs, *[pairs[0]] * fillers] for row in (2 * pair, 2 * pair + 1)]
    values = torch.nn.functional.pad(logprobs[rows], (0, padding), value=float("nan"))
    mask = torch.nn.functional.pad(whole.token_mask[rows], (0, padding))
    mask[2 * len(pairs) :] = False
    return inputs_of(values, mask, whole.columns[REFERENCE_SUMS].values[rows], whole.global_sequences)


@settings(deadline=None, max_examples=examples(100))
@given(
    config=configurations,
    microbatches=cuts(),
    padding=st.integers(0, 2),
    fillers=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_any_cut_adds_up_to_the_same(
    config: PreferenceLossConfig, microbatches: list[list[int]], padding: int, fillers: int, seed: int
) -> None:
    loss_function = PreferenceLoss(config)
    whole = random_pairs(seed, PAIRS, TARGETS)
    expected = loss_function(whole)
    (expected_gradient,) = torch.autograd.grad(expected.loss, whole.logprobs)
    logprobs = whole.logprobs.detach().requires_grad_()
    outputs = [loss_function(part(whole, logprobs, pairs, padding, fillers)) for pairs in microbatches]
    total = torch.stack([output.loss for output in outputs]).sum()
    (gradient,) = torch.autograd.grad(total, logprobs)
    assert total.item() == pytest.approx(expected.loss.item(), rel=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-15)
    for name, (value, reduction) in expected.metrics.items():
        series = [MetricSeries((output.metrics[name][0].item(),), reduction) for output in outputs]
        assert concatenate(series).reduce() == pytest.approx(value.item(), rel=1e-12, abs=1e-14)


def test_float32_sums_are_as_good_as_float64_ones() -> None:
    """Long responses whose log-probabilities differ little from the reference's: float32 sums would be off by 1e-4."""
    logprobs = -torch.rand(2, 20_000, generator=torch.Generator().manual_seed(0)) * 4
    mask = torch.ones(2, 20_000, dtype=torch.bool)
    reference = logprobs.double().sum(dim=1) - torch.tensor([0.01, 0.0])
    found = metrics_of(inputs_of(logprobs, mask, reference), config_of(reference_policy_kl_penalty=1.0))
    assert found["reward_margin"] == pytest.approx(0.01, abs=1e-9)
    assert found["accuracy"] == 1.0
