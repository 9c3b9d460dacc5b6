# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a reward model whose scores are NaN or infinite."""

import math
from pathlib import Path

import pytest

from nemo_rl_moe.config.loading import load_any_config
from nemo_rl_moe.config.schema import RMMasterConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.launch import evaluate_rm


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_scores_that_are_not_finite_are_an_error_without_output(
    broken: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_any_config("rm_tiny_moe.yaml", ["policy.model_name=model"], check_paths=False)
    assert isinstance(config, RMMasterConfig)
    scores = {"f:1": [1.0, 0.5], "f:2": [0.25, broken], "f:3": [broken, broken]}
    monkeypatch.setattr(evaluate_rm, "score_pairs", lambda config, run: scores)
    with pytest.raises(ConfigurationError) as caught:
        evaluate_rm.evaluate_rm(config, tmp_path / "out")
    assert caught.value.problems == [
        "policy.model_name: got model, which scores 2 of 3 pairs with NaN or infinity, expected finite scores;"
        f" the first: f:2 (chosen 0.25, rejected {broken})"
    ]
    assert not list(tmp_path.iterdir())
