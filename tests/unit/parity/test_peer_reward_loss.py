# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The loss of reward models against TRL's `RewardTrainer`, in float64: values, gradients and metrics.

`tests/make_peer_reward_loss.py` has called TRL and written `peer_reward_loss.json`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_moe.algorithms.losses.reward import RewardLoss
from nemo_rl_moe.data.margins import MARGINS
from nemo_rl_moe.distributed.batch import per_sequence
from nemo_rl_moe.models.interfaces import LossInputs, LossOutputs

VALUES = json.loads((Path(__file__).parent / "peer_reward_loss.json").read_text())


def in_pairs(values: Tensor) -> Tensor:
    """TRL has the chosen sequences first, then the rejected ones; here they alternate."""
    return torch.stack(values.chunk(2), dim=1).flatten(0, 1)


def as_theirs(values: Tensor) -> Tensor:
    return torch.cat([values[0::2], values[1::2]])


def our_loss(scores: Tensor, case: dict[str, Any]) -> LossOutputs:
    mask = torch.ones(len(scores), 1, dtype=torch.bool)
    columns = {}
    if case["has_margins"]:
        margins = torch.tensor(VALUES["margins"], dtype=torch.float64).repeat_interleave(2)
        columns[MARGINS] = per_sequence(margins)
    inputs = LossInputs(torch.zeros(mask.shape), mask, len(scores), len(scores), None, columns, scores=scores)
    return RewardLoss(case["center_rewards_coefficient"] or 0.0)(inputs)


@pytest.mark.parametrize("case", VALUES["cases"], ids=lambda case: f"{case['has_margins']}-{case['loss']:.3f}")
def test_losses_gradients_and_metrics(case: dict[str, Any]) -> None:
    hidden = in_pairs(torch.tensor(VALUES["hidden"], dtype=torch.float64))
    theirs = in_pairs(torch.tensor(case["scores"], dtype=torch.float64))
    # The head that gives TRL's scores, so that its gradient can be compared too.
    head = torch.linalg.lstsq(hidden, theirs[:, None]).solution[:, 0].requires_grad_()
    scores = hidden @ head
    torch.testing.assert_close(scores, theirs, rtol=1e-10, atol=1e-10)
    scores.retain_grad()
    found = our_loss(scores, case)
    found.loss.backward()
    assert found.loss.item() == pytest.approx(case["loss"], rel=1e-12)
    assert scores.grad is not None
    assert head.grad is not None
    gradient = torch.tensor(case["gradient"], dtype=torch.float64)
    torch.testing.assert_close(as_theirs(scores.grad), gradient, rtol=1e-10, atol=1e-12)
    of_head = torch.tensor(case["gradient_of_head"], dtype=torch.float64)
    torch.testing.assert_close(head.grad, of_head, rtol=1e-10, atol=1e-12)
    metrics = {name: float(value) for name, (value, _) in found.metrics.items()}
    assert metrics["accuracy"] == pytest.approx(case["metrics"]["accuracy"])
    assert metrics["reward_margin"] == pytest.approx(case["metrics"]["margin"])
    mean = (metrics["rewards_chosen_mean"] + metrics["rewards_rejected_mean"]) / 2
    assert mean == pytest.approx(case["metrics"]["mean_reward"])
