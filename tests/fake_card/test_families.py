# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A packed step of every model family on two cards is that over gloo: expert parallel, or data parallel if dense."""

from dataclasses import astuple

import pytest

from tests.fake_card.ranks import run_on_cards
from tests.support.family_models import FAMILY_MODELS
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import layout, tiny_policy
from tests.support.training_run import RunSettings, difference_by_rank, train_run

TOLERANCE = 1e-5
"""Of losses and norms relative, of metrics and weights absolute."""


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_a_step_of_a_family_on_cards_is_that_over_gloo(name: str) -> None:
    parallel = layout(ep=2) if FAMILY_MODELS[name].has_experts else {}
    policy = tiny_policy(2, sequence_packing__enabled=True, **parallel)
    settings = RunSettings(policy, name, batch={"vocabulary_size": 61}, num_steps=1)
    found, expected = run_on_cards(train_run, 2, settings), run_ranks(train_run, 2, settings)
    assert all(bool(metrics) == FAMILY_MODELS[name].has_experts for run in found for metrics in run.moe_metrics)
    assert max(astuple(difference_by_rank(found, expected))) <= TOLERANCE
