# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The whole loss against its second writing in every combination of switches, and what may not reach it."""

import pickle
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from nemo_rl_moe.algorithms.losses.policy_gradient import PolicyGradientLoss
from nemo_rl_moe.algorithms.losses.position_sums import QUARTERS, PositionSum, sum_key
from nemo_rl_moe.config.schema_grpo import PolicyGradientLossConfig
from nemo_rl_moe.distributed.batch import per_token
from nemo_rl_moe.models.interfaces import Head, LossInputs
from tests.support.quick_list import few_of, slow, some_of
from tests.unit.algorithms.policy_loss_reference import (
    columns_of,
    config_of,
    inputs_of,
    random_inputs,
    reference_loss,
    values_of,
)

SWITCHES = {
    "objective": ["clipped", "cispo"],
    "sequence_level_importance_ratios": [False, True],
    "token_level_loss": [False, True],
    "ratio_clip_c": [None, 1.5],
    "importance_sampling_correction": ["none", "truncated", "icepop"],
    "reference": [(0.0, "k3", "estimate"), *product([0.25], ["k1", "k2", "k3"], ["estimate", "divergence"])],
    "on_policy": [False, True],
}


def all_cases() -> list[tuple[PolicyGradientLossConfig, bool]]:
    cases = []
    for values in product(*SWITCHES.values()):
        case = dict(zip(SWITCHES, values, strict=True))
        on_policy, (weight, kind, gradient) = case.pop("on_policy"), case.pop("reference")
        case |= {"reference_policy_kl_penalty": weight, "reference_policy_kl_type": kind}
        case["reference_policy_kl_gradient"] = gradient
        cases.append((config_of(**case), on_policy))
    return cases


MEANS = [{"token_level_loss": True}, {"token_level_loss": False}, {"token_level_loss": False, "length_normalizer": 7}]
CORRECTIONS: list[dict[str, object]] = [
    {"importance_sampling_correction": "none"},
    {"importance_sampling_correction": "truncated", "importance_sampling_ratio_min": 0.8},
    {"importance_sampling_correction": "truncated", "importance_sampling_level": "sequence"},
    {"importance_sampling_correction": "icepop", "importance_sampling_level": "sequence"},
    {"importance_sampling_correction": "sequence_mask", "importance_sampling_ratio_min": 0.8},
]


def further_cases() -> list[tuple[PolicyGradientLossConfig, bool]]:
    """Means and corrections beside those of `SWITCHES`, and the objective without a ratio."""
    penalty = {"reference_policy_kl_penalty": 0.25}
    of_clipped = [mean | correction for mean, correction in product(MEANS[1:], CORRECTIONS)]
    without_ratio = [{"objective": "reinforce"} | mean | correction for mean, correction in product(MEANS, CORRECTIONS)]
    cases = [config_of(**penalty, **case) for case in (*of_clipped, *without_ratio)]
    return [(config, on_policy) for config, on_policy in product(cases, [False, True])]


def cases_of_other_objectives() -> list[tuple[PolicyGradientLossConfig, bool]]:
    """The objectives of single papers, each with the means that it allows."""
    cases = [
        config_of(objective=objective, ratio_clip_c=c, ratio_clip_min=0.1, ratio_clip_max=0.15, **mean)
        for objective in ("sapo", "gmpo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov")
        for mean, c in product(MEANS, [None, 1.2])
        if not (objective == "gmpo" and mean != {"token_level_loss": False})
    ]
    return [(config, on_policy) for config, on_policy in product(cases, [False, True])]


OTHER_CASES = cases_of_other_objectives()
CASES = [*all_cases(), *further_cases()]
FEW_CASES = CASES[::17]
# The others hold something constant that follows the log-probabilities.
WITH_FINITE_DIFFERENCES = [
    config
    for config, on_policy in CASES
    if config.objective == "clipped"
    and not on_policy
    and (config.reference_policy_kl_type, config.reference_policy_kl_gradient) != ("k2", "divergence")
]


def gradient_of(loss: Tensor, inputs: LossInputs) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
    return gradient


def test_value_and_gradient_equal_the_second_writing() -> None:
    inputs = random_inputs(seed=0)
    for config, on_policy in (*few_of(CASES), *OTHER_CASES):
        outputs = PolicyGradientLoss(config, on_policy)(inputs)
        expected = reference_loss(inputs, config, on_policy)
        message = f"{config} {on_policy=}"
        assert outputs.loss.item() == pytest.approx(expected.item(), rel=1e-12, abs=1e-14), message
        found, wanted = gradient_of(outputs.loss, inputs), gradient_of(expected, inputs)
        assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-14), message


@pytest.mark.parametrize("config", some_of(WITH_FINITE_DIFFERENCES[::7], 7))
def test_gradient_equals_finite_differences(config: PolicyGradientLossConfig) -> None:
    inputs = random_inputs(seed=1)

    def loss(logprobs: Tensor) -> Tensor:
        return PolicyGradientLoss(config, prev_is_current=False)(replace(inputs, logprobs=logprobs)).loss

    assert torch.autograd.gradcheck(loss, (inputs.logprobs,))


@pytest.mark.parametrize("bad", [float("nan"), *(slow(float(sign + "inf")) for sign in ("", "-")), 1e30])
def test_what_is_masked_reaches_nothing(bad: float) -> None:
    clean = random_inputs(seed=2)
    mask = clean.token_mask
    logprobs = clean.logprobs.detach().masked_fill(~mask, bad).requires_grad_()
    extras = {name: value.masked_fill(~mask, bad) for name, value in values_of(clean).items() if value.ndim == 2}
    extras["advantages"] = clean.columns["advantages"].values.masked_fill(~mask.any(dim=1), bad)
    dirty = replace(clean, logprobs=logprobs, columns=columns_of(extras))
    for config, on_policy in (*few_of(CASES), *OTHER_CASES[::5]):
        loss = PolicyGradientLoss(config, on_policy)
        expected, found = loss(clean), loss(dirty)
        assert torch.equal(found.loss, expected.loss)
        assert torch.equal(gradient_of(found.loss, dirty), gradient_of(expected.loss, clean))
        assert {name: value.item() for name, (value, _) in found.metrics.items()} == {
            name: value.item() for name, (value, _) in expected.metrics.items()
        }


@pytest.mark.parametrize("name", ["logprobs", "prev_logprobs", "generation_logprobs", "reference_logprobs"])
@pytest.mark.parametrize("correction", ["truncated", "icepop"])
def test_a_nan_among_the_valid_tokens_is_not_hidden(name: str, correction: str) -> None:
    config = config_of(importance_sampling_correction=correction, reference_policy_kl_penalty=0.1)
    inputs = random_inputs(seed=3)
    if name == "logprobs":
        logprobs = inputs.logprobs.detach().clone()
        logprobs[1, 0] = float("nan")
        inputs = replace(inputs, logprobs=logprobs)
    else:
        inputs.columns[name].values[1, 0] = float("nan")
    assert PolicyGradientLoss(config, prev_is_current=False)(inputs).loss.isnan()


@pytest.mark.parametrize("correction", ["none", "truncated"])
def test_the_training_pass_gives_the_log_probabilities_before_the_update_of_old_tokens_too(correction: str) -> None:
    inputs, config = random_inputs(seed=5), config_of(importance_sampling_correction=correction)
    prev = per_token(inputs.logprobs.detach().clone())
    given = replace(inputs, columns={**inputs.columns, "prev_logprobs": prev})
    to_generation = correction == "none"
    expected = PolicyGradientLoss(config, prev_is_current=False, ratio_to_generation=to_generation)(given)
    found = PolicyGradientLoss(config, prev_is_current=True, ratio_to_generation=to_generation)(inputs)
    gradient = gradient_of(found.loss, inputs)
    assert gradient.count_nonzero() > 0
    assert torch.equal(gradient, gradient_of(expected.loss, inputs))
    assert found.metrics == expected.metrics


@pytest.mark.parametrize(("config", "on_policy"), FEW_CASES)
def test_on_policy_is_prev_logprobs_taken_from_the_policy_itself(
    config: PolicyGradientLossConfig, on_policy: bool
) -> None:
    inputs = random_inputs(seed=4)
    given = replace(inputs, columns={**inputs.columns, "prev_logprobs": per_token(inputs.logprobs.detach().clone())})
    absent = replace(inputs, columns={k: v for k, v in inputs.columns.items() if k != "prev_logprobs"})
    expected = PolicyGradientLoss(config, prev_is_current=False)(given)
    found = PolicyGradientLoss(config, prev_is_current=True)(absent)
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(gradient_of(found.loss, inputs), gradient_of(expected.loss, inputs))
    assert found.metrics == expected.metrics
    assert found.metrics["probs_ratio"][0].item() == pytest.approx(
        int(inputs.token_mask.sum()) / inputs.global_valid_tokens
    )
    assert found.metrics["clip_fraction_low"][0] == found.metrics["clip_fraction_high"][0] == 0


def test_without_valid_tokens_in_the_global_batch_nothing_is_learned() -> None:
    inputs = random_inputs(seed=5)
    nothing = inputs_of(inputs.logprobs, torch.zeros_like(inputs.token_mask), **values_of(inputs))
    for config, on_policy in (*FEW_CASES, *OTHER_CASES):
        outputs = PolicyGradientLoss(config, on_policy)(nothing)
        assert outputs.loss.item() == 0.0
        assert gradient_of(outputs.loss, inputs).count_nonzero() == 0


@pytest.mark.parametrize("far", [pytest.param(100.0, marks=pytest.mark.full), 1000.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_policies_far_apart_leave_loss_and_gradient_finite(far: float, sign: int) -> None:
    logprobs = torch.full((2, 2), -1000.0, requires_grad=True)
    other = (logprobs.detach() + sign * far).clamp(max=0)
    extras = {f"{name}_logprobs": other for name in ("prev", "generation", "reference")}
    extras["prev_logprobs"] = logprobs.detach() - sign * far
    extras["selected_tokens"] = torch.ones(2, 2)
    inputs = inputs_of(logprobs, torch.ones(2, 2, dtype=torch.bool), advantages=torch.tensor([1.0, -1.0]), **extras)
    for config, on_policy in (*few_of(CASES), *OTHER_CASES):
        outputs = PolicyGradientLoss(config, on_policy)(inputs)
        assert outputs.loss.isfinite()
        assert gradient_of(outputs.loss, inputs).isfinite().all()
        assert all(value.isfinite() for value, _ in outputs.metrics.values())


def test_metrics_carry_no_gradient_and_their_names_follow_from_the_configuration() -> None:
    always = {
        "num_valid_tokens",
        "probs_ratio",
        "probs_ratio_clamped",
        "probs_ratio_min",
        "probs_ratio_max",
        "clip_fraction_low",
        "clip_fraction_high",
        "approx_entropy",
        "token_mult_prob_error",
        "gen_kl_error",
        "policy_kl_error",
        "js_divergence_error",
        *(f"sampling_importance_ratio{which}" for which in ("", "_min", "_max")),
        *(f"sampling_logp_difference{which}" for which in ("", "_max")),
        *(sum_key(quarter, each) for quarter in QUARTERS for each in PositionSum),
    }
    of_correction = {
        "none": set[str](),
        "truncated": {"importance_weight", "importance_weight_truncated_fraction"},
        "icepop": {"importance_weight", "importance_weight_dropped_fraction"},
        "sequence_mask": {"importance_weight", "importance_weight_dropped_fraction"},
    }
    for config, on_policy in FEW_CASES:
        outputs = PolicyGradientLoss(config, on_policy)(random_inputs(seed=6))
        of_reference = {"kl_penalty"} if config.reference_policy_kl_penalty > 0 else set()
        assert set(outputs.metrics) == always | of_correction[config.importance_sampling_correction] | of_reference
        assert all(not value.requires_grad and value.shape == () for value, _ in outputs.metrics.values())


def test_loss_is_the_surrogate_and_the_weighted_penalty() -> None:
    for token_level, correction in product([False, True], ["none", "truncated", "icepop"]):
        switches = {"token_level_loss": token_level, "importance_sampling_correction": correction}
        inputs = random_inputs(seed=7)
        without = PolicyGradientLoss(config_of(**switches), prev_is_current=False)(inputs)
        outputs = PolicyGradientLoss(config_of(**switches, reference_policy_kl_penalty=0.5), prev_is_current=False)(
            inputs
        )
        penalty = outputs.metrics["kl_penalty"][0].item()
        assert penalty > 0
        assert outputs.loss.item() == pytest.approx(without.loss.item() + 0.5 * penalty, rel=1e-12)


@pytest.mark.parametrize("mean", MEANS)
def test_the_entropy_bonus_lowers_the_loss_by_the_mean_of_the_entropy(mean: dict[str, object]) -> None:
    inputs, mask = random_inputs(seed=10), random_inputs(seed=10).token_mask
    entropy = torch.rand(mask.shape, dtype=torch.float64).masked_fill(~mask, float("nan")).requires_grad_()
    inputs = replace(inputs, entropy=entropy)
    without = PolicyGradientLoss(config_of(**mean), prev_is_current=False)
    loss = PolicyGradientLoss(config_of(**mean, entropy_bonus=0.5), prev_is_current=False)
    assert (loss.needs, without.needs) == ({Head.ENTROPY}, frozenset())
    outputs = loss(inputs)
    lengths = mask.sum(dim=1, keepdim=True).expand_as(mask)[mask].double()
    divisors = lengths * inputs.global_sequences
    if mean["token_level_loss"]:
        divisors = torch.full_like(lengths, inputs.global_valid_tokens)
    elif "length_normalizer" in mean:
        divisors = torch.full_like(lengths, 7 * inputs.global_sequences)
    expected = float((entropy.detach()[mask] / divisors).sum())
    assert outputs.metrics["entropy"][0].item() == pytest.approx(expected, rel=1e-12)
    assert outputs.loss.item() == pytest.approx(without(inputs).loss.item() - 0.5 * expected, rel=1e-12)
    (gradient,) = torch.autograd.grad(outputs.loss, entropy)
    torch.testing.assert_close(gradient[mask], -0.5 / divisors, rtol=1e-12, atol=0)
    assert not gradient[~mask].any()


def test_without_a_ratio_the_gradient_is_that_of_the_log_probability() -> None:
    """-A * log p, of a policy that has moved since the step began too: nothing is clipped."""
    inputs = random_inputs(seed=11, spread=3.0)
    outputs = PolicyGradientLoss(config_of(objective="reinforce"), prev_is_current=False)(inputs)
    advantages = inputs.columns["advantages"].values[:, None].expand_as(inputs.logprobs)
    wanted = (-advantages / inputs.global_valid_tokens).where(inputs.token_mask, 0.0)
    torch.testing.assert_close(gradient_of(outputs.loss, inputs), wanted, rtol=1e-12, atol=0)
    assert outputs.metrics["clip_fraction_low"][0] == outputs.metrics["clip_fraction_high"][0] == 0


@pytest.mark.parametrize("name", ["advantages", "generation_logprobs", "prev_logprobs", "reference_logprobs"])
def test_a_missing_tensor_is_named(name: str) -> None:
    inputs = random_inputs(seed=8)
    del inputs.columns[name]  # type: ignore[attr-defined]
    with pytest.raises(KeyError, match=name):
        PolicyGradientLoss(config_of(reference_policy_kl_penalty=0.1), prev_is_current=False)(inputs)


@pytest.mark.parametrize(("config", "on_policy"), some_of([*OTHER_CASES[::5], *FEW_CASES], 10))
def test_nothing_waits_for_the_device(config: PolicyGradientLossConfig, on_policy: bool) -> None:
    # A meta tensor has no values: whatever asks for one raises.
    inputs = random_inputs(seed=9)
    extras = {name: value.to("meta") for name, value in values_of(inputs).items()}
    logprobs = inputs.logprobs.detach().to("meta").requires_grad_()
    nowhere = replace(inputs, logprobs=logprobs, token_mask=inputs.token_mask.to("meta"), columns=columns_of(extras))
    outputs = PolicyGradientLoss(config, on_policy)(nowhere)
    gradient_of(outputs.loss, nowhere)
    assert all(value.device.type == "meta" for value, _ in outputs.metrics.values())


def test_advantages_of_another_precision_do_not_change_that_of_the_loss() -> None:
    inputs = random_inputs(seed=10)
    single = replace(inputs, logprobs=inputs.logprobs.detach().float().requires_grad_())
    outputs = PolicyGradientLoss(config_of(reference_policy_kl_penalty=0.1), prev_is_current=False)(single)
    assert outputs.loss.dtype is torch.float32


def test_survives_pickling() -> None:
    loss = PolicyGradientLoss(config_of(), prev_is_current=True)
    again = pickle.loads(pickle.dumps(loss))  # noqa: S301  (written on this line)
    assert again == loss
    inputs = random_inputs(seed=11)
    assert torch.equal(again(inputs).loss, loss(inputs).loss)
