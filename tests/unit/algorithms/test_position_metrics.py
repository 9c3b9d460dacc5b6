# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Mismatch by position against values worked out by hand, over microbatches, and beside that of the whole loss."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_rl_moe.algorithms.losses.position_sums import QUARTERS, PositionSum, quarters_of, sum_key
from nemo_rl_moe.algorithms.position_metrics import PositionMetrics
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.models.interfaces import LossInputs
from tests.support.quick_list import examples
from tests.unit.algorithms.policy_loss_reference import cut_at, inputs_of, random_inputs, result_of, series_of


def by_quarter(*parts: LossInputs) -> dict[str, float]:
    found = PositionMetrics().after_update(result_of(series_of(*parts)), PhaseClock())
    prefix, suffix = "by_position/", "/sampling_logp_difference"
    assert all(key.startswith(prefix) and key.endswith(suffix) for key in found)
    return {key.removeprefix(prefix).removesuffix(suffix): value for key, value in found.items()}


def with_gaps(gaps: Tensor, mask: Tensor) -> LossInputs:
    """Targets whose log-probability in training is that of generation and a gap; masked ones hold NaN."""
    generation = torch.full_like(gaps, -1.0).where(mask, torch.nan)
    prev = generation + gaps
    columns = {"prev_logprobs": prev, "generation_logprobs": generation, "advantages": torch.zeros(len(gaps))}
    return inputs_of(prev, mask, **columns)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("1111", "0123"),
        ("11111111", "00112233"),
        # Prompts and turns of others lie in between.
        ("0011011101", "..00.122.3"),
        ("111", "012"),
        ("1", "0"),
        ("0000", "...."),
    ],
)
def test_quarters_are_those_of_a_sequences_own_trained_tokens(mask: str, expected: str) -> None:
    found = quarters_of(torch.tensor([[each == "1" for each in mask]]))
    assert "".join("." if each < 0 else str(each) for each in found[0].tolist()) == expected


def test_means_over_two_sequences_by_hand() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    gaps = torch.tensor(
        [[9.0, 0.1, -0.2, 0.3, 0.4, 9.0, 9.0, 9.0], [0.0, 0.2, 0.2, -0.5, 0.3, 0.3, 1.0, -1.3]], dtype=torch.float64
    )
    # (0.1 + 0 + 0.2) / 3, (0.2 + 0.2 + 0.5) / 3, (0.3 + 0.3 + 0.3) / 3, (0.4 + 1 + 1.3) / 3
    expected = {"first_quarter": 0.1, "second_quarter": 0.3, "third_quarter": 0.3, "last_quarter": 0.9}
    whole = with_gaps(gaps, mask)
    assert by_quarter(whole) == pytest.approx(expected)
    assert by_quarter(*cut_at(whole, 1)) == pytest.approx(expected)


def test_a_quarter_without_tokens_has_no_metric() -> None:
    mask = torch.tensor([[False, True, True]])
    assert by_quarter(with_gaps(torch.tensor([[0.0, 0.5, 0.25]]), mask)) == {
        "first_quarter": pytest.approx(0.5),
        "third_quarter": pytest.approx(0.25),
    }
    assert by_quarter(with_gaps(torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.bool))) == {}


def test_another_loss_has_none() -> None:
    assert PositionMetrics().after_update(result_of({}), PhaseClock()) == {}


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 20))
@settings(max_examples=examples(40), deadline=None)
def test_the_mean_over_quarters_weighted_by_tokens_is_that_of_the_loss(seed: int, cut: int, targets: int) -> None:
    inputs = random_inputs(seed, targets=targets)
    inputs = replace(inputs, global_valid_tokens=int(inputs.token_mask.sum()))
    series = series_of(*cut_at(inputs, cut))
    tokens, sums = (sum(series[sum_key(name, each)].reduce() for name in QUARTERS) for each in PositionSum)
    assert tokens == inputs.global_valid_tokens
    assert sums / tokens == pytest.approx(series["sampling_logp_difference"].reduce(), rel=1e-9)
