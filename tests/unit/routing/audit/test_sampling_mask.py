# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities over a subset of the vocabulary are told from rounding, other temperatures and older weights."""

import numpy as np
import pytest

from nemo_rl_moe.routing.audit.sampling_mask import subset_metrics
from tests.support.quick_list import examples

TOKENS, VOCABULARY = 2000, 200


def drawn(
    seed: int, *, top_p: float = 1.0, top_k: int = VOCABULARY, moved: float = 0.0, temperature: float = 1.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-probabilities of training, of the rollout, and the mass that it keeps, of tokens drawn by the rollout."""
    generator = np.random.default_rng(seed)
    logits = 3 * generator.standard_normal((TOKENS, VOCABULARY))
    ours, theirs = (
        (of - np.log(np.exp(of).sum(-1, keepdims=True)))
        for of in (logits, logits / temperature + moved * generator.standard_normal(logits.shape))
    )
    order = (-theirs).argsort(-1)
    ranked = np.take_along_axis(np.exp(theirs), order, -1)
    kept = (ranked.cumsum(-1) - ranked < top_p) & (np.arange(VOCABULARY) < top_k)
    ranked *= kept
    mass = ranked.sum(-1)
    places = (ranked.cumsum(-1) > mass[:, None] * generator.random((TOKENS, 1))).argmax(-1)
    tokens = order[np.arange(TOKENS), places]
    rows = np.arange(TOKENS)
    noise = 0.003 * generator.standard_normal(TOKENS)
    return ours[rows, tokens], theirs[rows, tokens] - np.log(mass) + noise, mass


@pytest.mark.parametrize(("top_p", "top_k"), [(0.9, VOCABULARY), (0.95, VOCABULARY), (1.0, 10), (0.9, 20)])
def test_a_subset_is_found_and_its_mass_estimated(top_p: float, top_k: int) -> None:
    training, rollout, mass = drawn(0, top_p=top_p, top_k=top_k)
    found = subset_metrics(training - rollout)
    assert found["subset_mass"] == pytest.approx(mass.mean(), abs=0.005)
    assert found["subset_floor"] == pytest.approx(mass.min(), abs=0.05)
    assert subset_metrics(training - rollout - np.log(mass)) == {}


@pytest.mark.parametrize("moved", [0.0, 0.02, 0.1, 0.5, 1.5])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_other_weights_and_temperatures_are_no_subset(moved: float, temperature: float) -> None:
    for seed in range(examples(10)):
        training, rollout, _ = drawn(seed, moved=moved, temperature=temperature)
        assert subset_metrics(training - rollout) == {}


def test_few_tokens_say_nothing() -> None:
    training, rollout, _ = drawn(0, top_p=0.8)
    assert subset_metrics((training - rollout)[:100]) == {}
