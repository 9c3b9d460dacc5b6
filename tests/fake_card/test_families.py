# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A packed step of every model family on two cards is that over gloo: expert parallel, or data parallel if dense.

Families with an attention of their own also run tensor and pipeline parallel.
"""

from dataclasses import astuple
from typing import Any

import pytest

from tests.fake_card.ranks import run_on_cards
from tests.support.family_models import FAMILY_MODELS
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import layout, tiny_policy
from tests.support.training_run import RunSettings, difference_by_rank, train_run

TOLERANCE = 1e-5
"""Of losses and norms relative, of metrics and weights absolute."""


OTHERS = ("deepseek_v3", "deepseek_v32_sparse", "gpt_oss", "nemotron_h", "qwen3_5_moe_text")
"""Families with an attention of their own."""


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_a_step_of_a_family_on_cards_is_that_over_gloo(name: str) -> None:
    _assert_same_step(name, layout(ep=2) if FAMILY_MODELS[name].has_experts else {})


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}], ids=["tp2", "pp2"])
@pytest.mark.parametrize("name", OTHERS)
def test_a_step_in_another_layout_is_that_over_gloo(name: str, sizes: dict[str, int]) -> None:
    _assert_same_step(name, layout(**sizes))


def _assert_same_step(name: str, parallel: dict[str, Any]) -> None:
    policy = tiny_policy(2, sequence_packing__enabled=True, **parallel)
    settings = RunSettings(policy, name, batch={"vocabulary_size": 61}, num_steps=1)
    found, expected = run_on_cards(train_run, 2, settings), run_ranks(train_run, 2, settings)
    assert all(bool(metrics) == FAMILY_MODELS[name].has_experts for run in found for metrics in run.moe_metrics)
    assert max(astuple(difference_by_rank(found, expected))) <= TOLERANCE
