# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Load of the experts in the rollout, by hand and by verl's formula."""

import pytest
import torch

from nemo_rl_moe.routing.metrics.rollout_load import rollout_load_metrics


def test_violations_by_hand() -> None:
    counts = torch.tensor([[4, 4, 4, 4], [8, 0, 4, 4]])
    found = rollout_load_metrics(counts, (1, 3), per_layer=True)
    assert found == {
        "rollout/moe/max_vio/max": 1.0,
        "rollout/moe/max_vio/avg": 0.5,
        "rollout/moe/max_vio/layer_1": 0.0,
        "rollout/moe/max_vio/layer_3": 1.0,
        "rollout/moe/min_vio/max": 0.0,
        "rollout/moe/min_vio/avg": -0.5,
        "rollout/moe/min_vio/layer_1": 0.0,
        "rollout/moe/min_vio/layer_3": -1.0,
        "rollout/moe/avg_vio/max": 0.5,
        "rollout/moe/avg_vio/avg": 0.25,
        "rollout/moe/avg_vio/layer_1": 0.0,
        "rollout/moe/avg_vio/layer_3": 0.5,
    }


def test_without_details_and_without_routes() -> None:
    counts = torch.tensor([[1, 3], [0, 0]])
    found = rollout_load_metrics(counts, (0, 1), per_layer=False)
    assert len(found) == 6
    assert found["rollout/moe/max_vio/max"] == pytest.approx(0.5)
    assert found["rollout/moe/min_vio/avg"] == pytest.approx(-0.75)
    assert rollout_load_metrics(torch.zeros(2, 4, dtype=torch.long), (0, 1), per_layer=True) == {}
