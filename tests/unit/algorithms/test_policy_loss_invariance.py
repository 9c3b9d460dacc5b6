# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""However a global batch is cut, ordered and padded, its loss, gradients and metrics are the same."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_rl_moe.algorithms.losses.policy_gradient import PolicyGradientLoss
from nemo_rl_moe.config.schema_grpo import PolicyGradientLossConfig
from nemo_rl_moe.metrics import MetricSeries, Reduction, concatenate
from nemo_rl_moe.models.interfaces import LossInputs
from nemo_rl_moe.rl.objectives import OBJECTIVES
from tests.support.quick_list import examples
from tests.unit.algorithms.policy_loss_reference import config_of, inputs_of, random_inputs, values_of

SEQUENCES, TARGETS = 7, 5

configurations = st.builds(
    config_of,
    objective=st.sampled_from(list(OBJECTIVES)),
    sequence_level_importance_ratios=st.booleans(),
    token_level_loss=st.booleans(),
    length_normalizer=st.sampled_from([None, 7]),
    ratio_clip_c=st.sampled_from([None, 1.5]),
    importance_sampling_correction=st.sampled_from(["none", "truncated", "icepop", "sequence_mask"]),
    importance_sampling_level=st.sampled_from(["token", "sequence"]),
    importance_sampling_ratio_min=st.sampled_from([None, 0.8]),
    reference_policy_kl_penalty=st.sampled_from([0.0, 0.3]),
    reference_policy_kl_type=st.sampled_from(["k1", "k2", "k3"]),
)


@dataclass(frozen=True)
class Cut:
    """The sequences of one microbatch, and columns of padding that it has too many."""

    rows: Sequence[int]
    padding: int


@st.composite
def cuts(draw: st.DrawFn) -> list[list[Cut]]:
    """Ranks of microbatches, which hold every sequence once."""
    order = draw(st.permutations(range(SEQUENCES)))
    edges = sorted(draw(st.sets(st.integers(1, SEQUENCES - 1))))
    pieces = [order[a:b] for a, b in zip([0, *edges], [*edges, SEQUENCES], strict=True)]
    microbatches = [Cut(piece, draw(st.integers(0, 3))) for piece in pieces]
    first_rank = draw(st.integers(1, len(microbatches)))
    return [ranks for ranks in (microbatches[:first_rank], microbatches[first_rank:]) if ranks]


def microbatch(whole: LossInputs, logprobs: Tensor, cut: Cut) -> LossInputs:
    """Some sequences of the batch, with what is no number in the columns of padding."""
    rows = list(cut.rows)

    def part(values: Tensor) -> Tensor:
        padding = values.new_full((len(rows), cut.padding), float("nan"))
        return values[rows] if values.ndim == 1 else torch.cat([values[rows], padding], dim=1)

    mask = torch.nn.functional.pad(whole.token_mask[rows], (0, cut.padding))
    extras = {name: part(values) for name, values in values_of(whole).items()}
    return inputs_of(part(logprobs), mask, totals=(whole.global_valid_tokens, whole.global_sequences), **extras)


def whole_batch(seed: int) -> LossInputs:
    sampled = random_inputs(seed, SEQUENCES, TARGETS)
    return inputs_of(sampled.logprobs, sampled.token_mask, **values_of(sampled))


@settings(deadline=None, max_examples=examples(150))
@given(config=configurations, on_policy=st.booleans(), ranks=cuts(), seed=st.integers(0, 1000))
def test_any_cut_adds_up_to_the_same(
    config: PolicyGradientLossConfig, on_policy: bool, ranks: list[list[Cut]], seed: int
) -> None:
    loss_function = PolicyGradientLoss(config, on_policy)
    whole = whole_batch(seed)
    expected = loss_function(whole)
    (expected_gradient,) = torch.autograd.grad(expected.loss, whole.logprobs)

    logprobs = whole.logprobs.detach().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    of_ranks: dict[str, list[MetricSeries]] = {name: [] for name in expected.metrics}
    for microbatches in ranks:
        outputs = [loss_function(microbatch(whole, logprobs, cut)) for cut in microbatches]
        total = total + torch.stack([output.loss for output in outputs]).sum()
        for name, (_, reduction) in expected.metrics.items():
            values = tuple(output.metrics[name][0].item() for output in outputs)
            of_ranks[name].append(MetricSeries(values, reduction))
    (gradient,) = torch.autograd.grad(total, logprobs)

    assert total.item() == pytest.approx(expected.loss.item(), rel=1e-12, abs=1e-14)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-15)
    reduced = {name: concatenate(series).reduce() for name, series in of_ranks.items()}
    assert reduced == pytest.approx({name: value.item() for name, (value, _) in expected.metrics.items()}, rel=1e-12)


@pytest.mark.parametrize("token_level_loss", [False, True])
def test_repeating_the_global_batch_changes_no_mean(token_level_loss: bool) -> None:
    loss_function = PolicyGradientLoss(config_of(token_level_loss=token_level_loss), prev_is_current=False)
    whole = whole_batch(seed=0)
    twice = inputs_of(
        whole.logprobs.repeat(2, 1),
        whole.token_mask.repeat(2, 1),
        **{name: torch.cat([values, values]) for name, values in values_of(whole).items()},
    )
    once, again = loss_function(whole), loss_function(twice)
    assert again.loss.item() == pytest.approx(once.loss.item(), rel=1e-12)
    for name, (_, reduction) in once.metrics.items():
        if reduction in (Reduction.SUM, Reduction.PART):
            continue
        assert again.metrics[name][0].item() == pytest.approx(once.metrics[name][0].item(), rel=1e-12)
