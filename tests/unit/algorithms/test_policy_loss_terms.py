# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Each term of the policy loss, and each metric, worked out by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_moe.algorithms.losses.policy_gradient import PolicyGradientLoss
from nemo_rl_moe.algorithms.losses.position_sums import QUARTERS, PositionSum, sum_key
from nemo_rl_moe.distributed.batch import per_token
from nemo_rl_moe.metrics import Reduction
from nemo_rl_moe.models.interfaces import LossInputs, LossOutputs
from tests.unit.algorithms.policy_loss_reference import config_of, inputs_of


def one_token_each(
    ratios: list[float], advantages: list[float], prev: float = 0.5, generation: float | None = None
) -> LossInputs:
    """A sequence of one token for each ratio; `prev` and `generation` are probabilities."""
    previous = torch.full((len(ratios), 1), prev, dtype=torch.float64).log()
    logprobs = previous + torch.tensor(ratios, dtype=torch.float64).log()[:, None]
    return inputs_of(
        logprobs.requires_grad_(),
        torch.ones(len(ratios), 1, dtype=torch.bool),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        prev_logprobs=previous,
        generation_logprobs=previous if generation is None else torch.full_like(previous, math.log(generation)),
    )


def sequences(
    mask: list[list[int]], new: list[list[float]], old: list[list[float]], advantages: list[float]
) -> LossInputs:
    """Return inputs of given probabilities; generation agrees with `old`."""
    previous = torch.tensor(old, dtype=torch.float64).log()
    return inputs_of(
        torch.tensor(new, dtype=torch.float64).log().requires_grad_(),
        torch.tensor(mask, dtype=torch.bool),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        prev_logprobs=previous,
        generation_logprobs=previous,
    )


def run(inputs: LossInputs, on_policy: bool = False, **changes: Any) -> tuple[LossOutputs, Tensor]:
    outputs = PolicyGradientLoss(config_of(**changes), on_policy)(inputs)
    (gradient,) = torch.autograd.grad(outputs.loss, inputs.logprobs)
    return outputs, gradient


def values_of(outputs: LossOutputs) -> dict[str, float]:
    return {name: value.item() for name, (value, _) in outputs.metrics.items()}


@pytest.mark.parametrize(
    ("dual_clip", "ratio", "advantage", "loss", "gradient"),
    [
        (None, 1.0, 2.0, -2.0, -2.0),
        (None, 1.2, 2.0, -2.4, -2.4),
        (None, 1.5, 2.0, -2.6, 0.0),  # held at 1.3
        (None, 0.5, 2.0, -1.0, -1.0),  # not held: the way back stays open
        (None, 1.0, -2.0, 2.0, 2.0),
        (None, 0.9, -2.0, 1.8, 1.8),
        (None, 0.5, -2.0, 1.6, 0.0),  # held at 0.8
        (None, 1.5, -2.0, 3.0, 3.0),
        (None, 4.0, -2.0, 8.0, 8.0),
        (None, 5.0, 0.0, 0.0, 0.0),
        (3.0, 2.9, -2.0, 5.8, 5.8),
        (3.0, 4.0, -2.0, 6.0, 0.0),  # held at 3
        (3.0, 0.5, -2.0, 1.6, 0.0),
        (3.0, 4.0, 2.0, -2.6, 0.0),  # dual clip is for negative advantages
    ],
)
def test_clipped_surrogate_and_dual_clip(
    dual_clip: float | None, ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    outputs, found = run(one_token_each([ratio], [advantage], prev=0.125), ratio_clip_c=dual_clip)
    assert outputs.loss.item() == pytest.approx(loss, abs=1e-14)
    # The derivative of a ratio to its log-probability is the ratio.
    assert found.item() == pytest.approx(gradient, abs=1e-14)


@pytest.mark.parametrize(("ratio", "weight"), [(1.1, 1.1), (2.0, 1.3), (0.5, 0.8)])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo(ratio: float, weight: float, advantage: float) -> None:
    outputs, gradient = run(one_token_each([ratio], [advantage], prev=0.25), objective="cispo")
    assert outputs.loss.item() == pytest.approx(-weight * advantage * math.log(0.25 * ratio), rel=1e-14)
    assert gradient.item() == pytest.approx(-weight * advantage, rel=1e-14)


def test_means_over_tokens_and_over_sequences() -> None:
    # Ratios 1.1 and 0.9 in the first sequence, 1.2 in the second, none in the third.
    mask, advantages = [[1, 1], [0, 1], [0, 0]], [1.0, -1.0, 5.0]
    new, old = [[0.55, 0.45], [0.1, 0.24], [0.5, 0.5]], [[0.5, 0.5], [0.9, 0.2], [0.1, 0.9]]
    of_tokens, _ = run(sequences(mask, new, old, advantages))
    assert of_tokens.loss.item() == pytest.approx((-1.1 - 0.9 + 1.2) / 3, rel=1e-14)
    of_sequences, gradient = run(sequences(mask, new, old, advantages), token_level_loss=False)
    assert of_sequences.loss.item() == pytest.approx((-(1.1 + 0.9) / 2 + 1.2) / 2, rel=1e-14)
    assert gradient.flatten().tolist() == pytest.approx([-1.1 / 4, -0.9 / 4, 0, 1.2 / 2, 0, 0], rel=1e-14)


def test_gspo_by_hand() -> None:
    # Token ratios 1.21 and 1: their geometric mean is 1.1, in reach of the clip that the first alone would not be.
    inputs = sequences([[1, 1]], [[0.605, 0.5]], [[0.5, 0.5]], [2.0])
    outputs, gradient = run(inputs, sequence_level_importance_ratios=True, ratio_clip_max=0.15)
    assert outputs.loss.item() == pytest.approx(-2 * 1.1, rel=1e-14)
    # Each of the two tokens moves the ratio by half of it.
    assert gradient.flatten().tolist() == pytest.approx([-1.1, -1.1], rel=1e-14)
    assert values_of(outputs)["probs_ratio_max"] == pytest.approx(1.1, rel=1e-14)
    assert values_of(outputs)["clip_fraction_high"] == 0.0


def test_gspo_clips_whole_sequences() -> None:
    inputs = sequences([[1, 1], [1, 0]], [[0.9, 0.5], [0.5, 0.5]], [[0.4, 0.4], [0.5, 0.1]], [1.0, 1.0])
    outputs, gradient = run(inputs, sequence_level_importance_ratios=True, token_level_loss=False)
    assert outputs.loss.item() == pytest.approx(-(1.3 + 1) / 2, rel=1e-14)
    assert gradient.flatten().tolist() == pytest.approx([0, 0, -0.5, 0], abs=1e-15)
    assert values_of(outputs)["clip_fraction_high"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("kind", "d", "clamp", "kl", "gradient"),
    # d = log reference - log policy; the derivatives to log policy are 1, -d and 1 - e^d.
    [
        ("k1", math.log(0.5), 10.0, math.log(2), 1.0),
        ("k2", math.log(0.5), 10.0, math.log(2) ** 2 / 2, math.log(2)),
        ("k3", math.log(0.5), 10.0, 0.5 - 1 + math.log(2), 1 - 0.5),
        ("k3", 10.0, None, math.expm1(10) - 10, 1 - math.exp(10)),  # 22,015 nats
        ("k3", 10.0, 10.0, 10.0, 0.0),
        ("k3", 2.0, 10.0, math.exp(2) - 3, 1 - math.exp(2)),  # 4.4
        ("k3", 3.0, 10.0, 10.0, 0.0),  # 16.1
        ("k3", 3.0, 20.0, math.exp(3) - 4, 1 - math.exp(3)),
        ("k3", -11.5, 10.0, 10.0, 0.0),  # 10.5
        ("k3", -10.5, 10.0, math.exp(-10.5) + 9.5, 1 - math.exp(-10.5)),
        ("k2", 4.0, 10.0, 8.0, -4.0),
        ("k2", 5.0, 10.0, 10.0, 0.0),
        ("k1", 12.0, 10.0, -10.0, 0.0),
        ("k1", -12.0, 10.0, 10.0, 0.0),
        ("k1", -9.0, 10.0, 9.0, 1.0),
    ],
)
def test_penalty_on_the_divergence_from_the_reference_counts_no_more_than_the_clamp(
    kind: str, d: float, clamp: float | None, kl: float, gradient: float
) -> None:
    inputs = one_token_each([1.0], [0.0])
    inputs.columns["reference_logprobs"] = per_token(torch.full((1, 1), math.log(0.5) + d, dtype=torch.float64))
    outputs, found = run(
        inputs, reference_policy_kl_penalty=0.1, reference_policy_kl_type=kind, kl_output_clamp_value=clamp
    )
    assert values_of(outputs)["kl_penalty"] == pytest.approx(kl, rel=1e-12)
    assert outputs.loss.item() == pytest.approx(0.1 * kl, rel=1e-12)
    assert found.item() == pytest.approx(0.1 * gradient, rel=1e-12)


def test_without_a_lower_clip_every_ratio_goes_down_to_0() -> None:
    for objective, loss in (("clipped", 2e-6), ("cispo", -math.log(1e-6 / 8) * 1e-6 * -2.0)):
        outputs, gradient = run(one_token_each([1e-6], [-2.0], prev=0.125), objective=objective, ratio_clip_min=1.0)
        assert outputs.loss.item() == pytest.approx(loss, rel=1e-9)
        assert gradient.item() == pytest.approx(2e-6, rel=1e-9)


@pytest.mark.parametrize(
    ("correction", "generation", "weight", "out"),
    # Training gives 0.5 before the step; the bounds are 0.5 and 2.
    [
        ("none", 0.1, 1.0, None),
        ("truncated", 0.4, 1.25, 0.0),
        ("truncated", 0.125, 2.0, 1.0),
        ("truncated", 1.0, 0.5, 0.0),
        ("icepop", 0.4, 1.25, 0.0),
        ("icepop", 0.25, 2.0, 0.0),
        ("icepop", 1.0, 0.5, 0.0),
        ("icepop", 0.125, 0.0, 1.0),
    ],
)
def test_importance_sampling_correction(correction: str, generation: float, weight: float, out: float | None) -> None:
    inputs = one_token_each([1.1], [3.0], generation=generation)
    inputs.columns["reference_logprobs"] = per_token(torch.full((1, 1), math.log(0.25), dtype=torch.float64))
    outputs, gradient = run(
        inputs,
        importance_sampling_correction=correction,
        reference_policy_kl_penalty=0.1,
        reference_policy_kl_type="k1",
    )
    kl = math.log(0.55 / 0.25)
    assert outputs.loss.item() == pytest.approx(weight * (-3.3 + 0.1 * kl), rel=1e-14)
    # The weight is a constant: it scales the gradient and has none.
    assert gradient.item() == pytest.approx(weight * (-3.3 + 0.1), rel=1e-14)
    assert values_of(outputs)["kl_penalty"] == pytest.approx(weight * kl, rel=1e-14)
    deed = {"none": None, "truncated": "truncated", "icepop": "dropped"}[correction]
    assert values_of(outputs).get("importance_weight") == (None if out is None else pytest.approx(weight, rel=1e-14))
    assert values_of(outputs).get(f"importance_weight_{deed}_fraction") == out


def test_tokens_that_icepop_drops_still_count_in_the_divisor() -> None:
    inputs = one_token_each([1.0, 1.0], [1.0, 1.0])
    inputs.columns["generation_logprobs"] = per_token(torch.tensor([[0.5], [0.01]], dtype=torch.float64).log())
    outputs, gradient = run(inputs, importance_sampling_correction="icepop")
    assert gradient.flatten().tolist() == [-0.5, 0.0]
    assert values_of(outputs)["importance_weight"] == 0.5
    assert values_of(outputs)["importance_weight_dropped_fraction"] == 0.5


def test_ratio_metrics_of_the_clipped_surrogate_and_of_cispo() -> None:
    inputs = one_token_each([0.5, 0.5, 1.0, 1.8, 1.8, 1.8], [1.0, -1.0, 1.0, 1.0, -1.0, 0.0], prev=0.25)
    metrics = values_of(run(inputs)[0])
    assert metrics["probs_ratio"] == pytest.approx((0.5 + 0.5 + 1 + 3 * 1.8) / 6)
    assert metrics["probs_ratio_clamped"] == pytest.approx((0.8 + 0.8 + 1 + 3 * 1.3) / 6)
    assert metrics["probs_ratio_min"] == pytest.approx(0.5)
    assert metrics["probs_ratio_max"] == pytest.approx(1.8)
    assert metrics["clip_fraction_low"] == pytest.approx(1 / 6)
    assert metrics["clip_fraction_high"] == pytest.approx(1 / 6)
    assert values_of(run(inputs, ratio_clip_c=1.5)[0])["clip_fraction_high"] == pytest.approx(2 / 6)
    of_cispo = values_of(run(inputs, objective="cispo")[0])
    assert of_cispo["clip_fraction_low"] == pytest.approx(2 / 6), "whatever the advantage"
    assert of_cispo["clip_fraction_high"] == pytest.approx(3 / 6)


def test_least_and_largest_ratio_are_of_valid_tokens() -> None:
    inputs = sequences([[1, 1, 0]], [[0.6, 0.7, 0.5]], [[0.5, 0.5, 0.5]], [1.0])
    assert values_of(run(inputs)[0])["probs_ratio_min"] == pytest.approx(1.2)
    inputs = sequences([[1, 1, 0]], [[0.4, 0.3, 0.5]], [[0.5, 0.5, 0.5]], [1.0])
    assert values_of(run(inputs)[0])["probs_ratio_max"] == pytest.approx(0.8)


def test_metrics_of_generation_against_training() -> None:
    mask = torch.tensor([[True, True, False]])
    inputs = inputs_of(
        torch.tensor([[0.5, 0.2, 0.7]], dtype=torch.float64).log().requires_grad_(),
        mask,
        totals=(4, 2),
        advantages=torch.zeros(1, dtype=torch.float64),
        prev_logprobs=torch.tensor([[0.3, 0.25, 0.7]], dtype=torch.float64).log(),
        generation_logprobs=torch.tensor([[0.5, 0.2, 0.1]], dtype=torch.float64).log(),
    )
    outputs, _ = run(inputs)
    metrics = values_of(outputs)
    # The shares of a global batch with two more valid tokens elsewhere.
    assert metrics["token_mult_prob_error"] == pytest.approx((0.5 / 0.3 + 1.25) / 4, rel=1e-14)
    k3 = (0.6 - 1 - math.log(0.6)) + (1.25 - 1 - math.log(1.25))
    assert metrics["gen_kl_error"] == pytest.approx(k3 / 4, rel=1e-13)
    other_way = (0.5 / 0.3 - 1 - math.log(0.5 / 0.3)) + (0.8 - 1 - math.log(0.8))
    assert metrics["policy_kl_error"] == pytest.approx(other_way / 4, rel=1e-13)
    # Of both from their means 0.4 and 0.225.
    halves = [p / m - 1 - math.log(p / m) for p, m in ((0.3, 0.4), (0.5, 0.4), (0.25, 0.225), (0.2, 0.225))]
    assert metrics["js_divergence_error"] == pytest.approx(sum(halves) / 2 / 4, rel=1e-13)
    assert metrics["sampling_importance_ratio"] == pytest.approx((0.6 + 1.25) / 4, rel=1e-14)
    assert metrics["sampling_importance_ratio_min"] == pytest.approx(0.6, rel=1e-14)
    assert metrics["sampling_importance_ratio_max"] == pytest.approx(1.25, rel=1e-14)
    gaps = math.log(0.5 / 0.3), math.log(1.25)
    assert metrics["sampling_logp_difference"] == pytest.approx(sum(gaps) / 4, rel=1e-14)
    assert metrics["sampling_logp_difference_max"] == pytest.approx(max(gaps), rel=1e-14)
    assert metrics["approx_entropy"] == pytest.approx(-(math.log(0.5) + math.log(0.2)) / 4, rel=1e-14)
    assert metrics["num_valid_tokens"] == 2


def test_entropy_is_weighted_to_the_policy_as_it_is_now() -> None:
    # Two tokens, sampled evenly by generation; the policy now gives them 0.8 and 0.2.
    inputs = sequences([[1], [1]], [[0.8], [0.2]], [[0.5], [0.5]], [0.0, 0.0])
    entropy = -(0.8 * math.log(0.8) + 0.2 * math.log(0.2))
    assert values_of(run(inputs)[0])["approx_entropy"] == pytest.approx(entropy, rel=1e-14)


def test_each_metric_says_how_it_is_reduced() -> None:
    inputs = one_token_each([1.0], [1.0])
    inputs.columns["reference_logprobs"] = inputs.columns["prev_logprobs"]
    outputs, _ = run(inputs, reference_policy_kl_penalty=0.1, importance_sampling_correction="icepop")
    extremes = ("probs_ratio", "sampling_importance_ratio")
    others = {f"{name}_min": Reduction.MIN for name in extremes} | {f"{name}_max": Reduction.MAX for name in extremes}
    others |= {"sampling_logp_difference_max": Reduction.MAX, "num_valid_tokens": Reduction.SUM}
    others |= {sum_key(quarter, each): Reduction.PART for quarter in QUARTERS for each in PositionSum}
    assert {name: how for name, (_, how) in outputs.metrics.items() if how is not Reduction.SHARE} == others
