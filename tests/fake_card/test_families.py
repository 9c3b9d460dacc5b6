# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A packed step of every model family on two cards is that over gloo: expert parallel, or data parallel if dense."""

import numpy as np
import pytest

from tests.fake_card.ranks import run_on_cards
from tests.support.family_models import FAMILY_MODELS
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import layout, tiny_policy
from tests.support.training_run import RunSettings, full_weights, train_run

TOLERANCE = 1e-5
"""Of losses and norms relative, of metrics and weights absolute."""


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_a_step_of_a_family_on_cards_is_that_over_gloo(name: str) -> None:
    parallel = layout(ep=2) if FAMILY_MODELS[name].has_experts else {}
    policy = tiny_policy(2, sequence_packing__enabled=True, **parallel)
    settings = RunSettings(policy, name, batch={"vocabulary_size": 61}, num_steps=1)
    found, expected = run_on_cards(train_run, 2, settings), run_ranks(train_run, 2, settings)
    for run, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(run.losses + run.grad_norms, other.losses + other.grad_norms, rtol=TOLERANCE)
        (metrics,), (others,) = run.moe_metrics, other.moe_metrics
        assert metrics.keys() == others.keys()
        assert bool(metrics) == FAMILY_MODELS[name].has_experts
        np.testing.assert_allclose(list(metrics.values()), [others[key] for key in metrics], atol=TOLERANCE)
    weights, others_weights = full_weights(found), full_weights(expected)
    assert weights.keys() == others_weights.keys()
    for key, values in others_weights.items():
        np.testing.assert_allclose(weights[key], values, atol=TOLERANCE, err_msg=key)
