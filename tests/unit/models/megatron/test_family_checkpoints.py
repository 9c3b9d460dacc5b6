# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Modules that few families have go through a checkpoint, and into another layout."""

from pathlib import Path

import pytest

from tests.support.checkpoint_run import load_and_train, train_and_save
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import layout, tiny_policy
from tests.support.training_run import RunSettings

SAVE_AFTER, NUM_STEPS = 1, 3


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        # Norms of all heads: every rank holds the weights of all.
        ("olmoe", {"tp": 2}),
        # A gate that tensor parallelism leaves whole, beside a shared expert that it cuts; biases of queries and keys.
        pytest.param("qwen2_moe", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("glm4_moe", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("glm4_moe_lite", {"pp": 2, "vpp": 2}, marks=pytest.mark.slow),
        pytest.param("minimax_m2", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("kimi_k2", {"ep": 2}, marks=pytest.mark.slow),
        pytest.param("glm_moe_dsa", {"pp": 2}, marks=pytest.mark.slow),
        # Sections of rows that tensor parallelism cuts each.
        ("qwen3_next", {"tp": 2}),
        pytest.param("qwen3_5_moe_text", {"pp": 2, "vpp": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3_5_text", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("qwen2_yarn_positions", {"pp": 2}, marks=pytest.mark.slow),
    ],
)
def test_one_rank_goes_on_where_two_stopped(model: str, sizes: dict[str, int], tmp_path: Path) -> None:
    writer = RunSettings(tiny_policy(2, **layout(**sizes)), model=model)
    written = run_ranks(train_and_save, 2, writer, str(tmp_path), SAVE_AFTER, NUM_STEPS)[0]
    reader = RunSettings(tiny_policy(1), model=model)
    (found,) = run_ranks(load_and_train, 1, reader, str(tmp_path), SAVE_AFTER, NUM_STEPS)
    for step, expected in zip(found, written[SAVE_AFTER:], strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], rel=5e-6)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=5e-6)
