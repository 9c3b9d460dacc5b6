# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Sampling against exact probabilities, and what must hold for every distribution."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nemo_rl_moe.generation.interface import SamplingParameters
from nemo_rl_moe.models.megatron.generation.sampling import draw, sample, truncate, uniform_numbers

LOGITS = torch.tensor([[0.3, -1.2, 2.0, 0.0, 0.9, -3.0, 1.1, 0.2]])
DRAWS = 20_000

# Chi-square is above these once in a thousand times, by degrees of freedom.
CRITICAL = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32}

probabilities = st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any)
shares = st.floats(0.01, 1.0)
ranks = st.one_of(st.none(), st.integers(1, 15))


def one_row(weights: list[int]) -> Tensor:
    values = torch.tensor([weights], dtype=torch.float32)
    return values / values.sum()


def exact_probabilities(parameters: SamplingParameters) -> np.ndarray:
    """By the definition, token after token, in float64."""
    scores = np.exp(LOGITS[0].double().numpy() / parameters.temperature)
    ranking = np.argsort(-scores, kind="stable")[: parameters.top_k]
    share = scores[ranking] / scores[ranking].sum()
    kept = [rank for rank in range(len(ranking)) if share[:rank].sum() < parameters.top_p]
    result = np.zeros(len(scores))
    result[ranking[kept]] = share[kept] / share[kept].sum()
    return result


@pytest.mark.parametrize(
    "parameters",
    [
        SamplingParameters(1),
        SamplingParameters(1, temperature=0.7),
        SamplingParameters(1, temperature=1.5, top_k=3),
        SamplingParameters(1, top_p=0.8),
        SamplingParameters(1, temperature=2.0, top_k=6, top_p=0.7),
    ],
)
def test_frequencies_are_the_probabilities(parameters: SamplingParameters) -> None:
    uniforms = torch.from_numpy(uniform_numbers(7, DRAWS))
    token_ids, logprobs, kept_mass, _ = sample(LOGITS.expand(DRAWS, -1), uniforms, parameters)
    expected = exact_probabilities(parameters) * DRAWS
    found = np.bincount(token_ids.numpy(), minlength=len(expected))
    possible = expected > 0
    assert not found[~possible].any()
    chi_square = ((found - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < CRITICAL[possible.sum() - 1]
    # Top-k and top-p choose among tokens, and change no log-probability.
    everything = (LOGITS[0].double() / parameters.temperature).log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), everything[token_ids], rtol=0, atol=1e-6)
    # What they kept is how much more often than that each token is sampled.
    mass = everything.exp()[torch.from_numpy(possible)].sum().item()
    assert kept_mass.tolist() == pytest.approx([mass] * DRAWS, abs=1e-6)


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (6, 0.7), (50, 0.8)])
def test_log_probabilities_are_over_the_kept_tokens_where_these_are_returned(top_k: int, top_p: float) -> None:
    parameters = SamplingParameters(1, temperature=1.5, top_k=top_k, top_p=top_p, returns_kept_tokens=True)
    uniforms = torch.from_numpy(uniform_numbers(7, 100))
    found = sample(LOGITS.expand(100, -1), uniforms, parameters)
    probabilities = exact_probabilities(parameters)
    assert found.kept_tokens is not None
    assert found.kept_tokens.shape == (100, top_k)
    columns = (found.token_ids, found.logprobs, found.kept_tokens)
    for token, logprob, ids in zip(*(values.tolist() for values in columns), strict=True):
        assert logprob == pytest.approx(np.log(probabilities[token]), abs=1e-6)
        assert sorted(kept for kept in ids if kept >= 0) == np.flatnonzero(probabilities).tolist()


def test_greedy_takes_the_first_and_its_logprob_without_temperature() -> None:
    token_ids, logprobs, kept_mass, kept_tokens = sample(
        LOGITS, torch.zeros(1), SamplingParameters(1, temperature=0.0, top_k=1)
    )
    assert token_ids.tolist() == [2]
    assert kept_mass.tolist() == [1.0]
    assert kept_tokens is None
    assert logprobs.item() == pytest.approx(LOGITS.log_softmax(-1)[0, 2].item(), abs=1e-6)


def test_a_row_does_not_see_the_others() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, uniforms = torch.randn(9, 40, generator=generator), torch.from_numpy(uniform_numbers(1, 9))
    parameters = SamplingParameters(1, top_k=20, top_p=0.9)
    together = sample(logits, uniforms, parameters)
    for row in range(9):
        alone = sample(logits[row : row + 1], uniforms[row : row + 1], parameters)
        assert alone.token_ids[0] == together.token_ids[row]
        assert alone.logprobs[0] == together.logprobs[row]


def test_huge_logits() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e30, 88.0, -1e30]])
    token_ids, logprobs, *_ = sample(logits, torch.tensor([0.999, 0.0], dtype=torch.float64), SamplingParameters(1))
    assert token_ids.tolist() == [0, 1]
    assert logprobs.tolist() == [0.0, 0.0]


def test_rare_tokens_of_a_large_vocabulary_are_sampled() -> None:
    # In float32 the tail would vanish behind the sum before it.
    weights = torch.full((1, 100_001), 1e-9)
    weights[0, 0] = 1.0
    last = draw(weights, torch.tensor([1 - 2**-53], dtype=torch.float64))
    assert last.item() == 100_000
    middle = (1 + 0.5e-4) / (1 + 1e-4)
    assert abs(draw(weights, torch.tensor([middle], dtype=torch.float64)).item() - 50_000) < 20


@given(probabilities, st.integers(0, 2**53 - 1))
def test_never_a_token_of_weight_zero(weights: list[int], numerator: int) -> None:
    sampled = draw(one_row(weights), torch.tensor([numerator / 2**53], dtype=torch.float64)).item()
    assert weights[int(sampled)] > 0


@given(probabilities)
def test_extreme_numbers_draw_the_first_and_the_last_possible_token(weights: list[int]) -> None:
    possible = np.flatnonzero(weights)
    uniforms = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    sampled = draw(one_row(weights).expand(2, -1), uniforms)
    assert sampled.tolist() == [possible[0], possible[-1]]


@given(probabilities, ranks, shares)
def test_truncation_keeps_the_fewest_most_likely_tokens(weights: list[int], top_k: int | None, top_p: float) -> None:
    probs = one_row(weights)
    kept = truncate(probs, top_k, top_p)[0]
    chosen = kept > 0
    torch.testing.assert_close(kept[chosen], probs[0][chosen], rtol=0, atol=0)
    ranked = probs[0].double().sort(descending=True, stable=True).values[: top_k or len(weights)]
    count = int(chosen.sum())
    assert 1 <= count <= min(top_k or len(weights), int((probs > 0).sum()))
    # No token that was left out is likelier than one that was kept.
    assert not (~chosen).any() or probs[0][~chosen].max() <= probs[0][chosen].min()
    total = ranked.sum()
    assert ranked[:count].sum() >= (top_p - 1e-6) * total
    assert ranked[: count - 1].sum() < (top_p + 1e-6) * total


@given(probabilities, st.integers(1, 15))
def test_wider_truncation_keeps_what_a_narrower_one_kept(weights: list[int], top_k: int) -> None:
    probs = one_row(weights)
    narrow, wide = truncate(probs, top_k, 0.6), truncate(probs, top_k + 1, 0.9)
    assert not ((narrow > 0) & (wide == 0)).any()


@given(st.integers(0, 2**64), st.integers(1, 30), st.integers(1, 30))
def test_uniform_numbers_depend_on_seed_and_position_alone(seed: int, short: int, more: int) -> None:
    long = uniform_numbers(seed, short + more)
    assert (uniform_numbers(seed, short) == long[:short]).all()
    assert ((long >= 0) & (long < 1)).all()
    assert (uniform_numbers(seed + 1, short + more) != long).any()
