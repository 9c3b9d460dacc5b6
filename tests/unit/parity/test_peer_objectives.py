# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Objectives and the optimal token baseline against functions of verl and TRL, in float64.

`tests/make_peer_objectives.py` has called the functions and written `peer_objectives.json`.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_moe.algorithms.losses.policy_gradient import SELECTED_TOKENS, PolicyGradientLoss
from nemo_rl_moe.config.schema_grpo import AdvantageConfig
from nemo_rl_moe.rl.estimators import ESTIMATORS
from nemo_rl_moe.rl.estimators.interface import EstimatorInputs
from nemo_rl_moe.rl.objectives import OBJECTIVES
from tests.unit.algorithms import policy_loss_reference

VALUES = json.loads((Path(__file__).parent / "peer_objectives.json").read_text())


def cases(kind: str) -> list[Any]:
    """The cases of a kind, named as peer, function and settings."""
    return [
        pytest.param(case, id=f"{peer}: {case['function']} {number}")
        for peer, found in VALUES["peers"].items()
        for number, case in enumerate(found["cases"])
        if case["kind"] == kind
    ]


@cache
def inputs() -> dict[str, Tensor]:
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in VALUES["inputs"].items()}


def loss_and_gradient(settings: dict[str, Any], *, on_policy: bool) -> tuple[float, Tensor]:
    """Our loss and its gradient by the log-probabilities, with the peer's one old policy as engine and trainer."""
    given, config = inputs(), policy_loss_reference.config_of(**settings)
    logprobs, mask = given["logprobs"].clone().requires_grad_(), given["mask_with_gaps"].bool()
    advantages = given["advantages"][:, None].expand_as(logprobs)
    old = logprobs.detach() if on_policy else given["old_logprobs"]
    columns = {"advantages": advantages, "prev_logprobs": old, "generation_logprobs": old}
    select = OBJECTIVES[config.objective].select
    if select is not None:  # verl selects by the log-probabilities of the trained policy
        columns[SELECTED_TOKENS] = select(logprobs.detach(), advantages, mask, config, torch.Generator())
    batch = policy_loss_reference.inputs_of(logprobs, mask, **columns)
    loss = PolicyGradientLoss(config, prev_is_current=on_policy)(batch).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), gradient


@pytest.mark.parametrize("case", cases("loss"))
def test_losses_and_gradients(case: dict[str, Any]) -> None:
    loss, gradient = loss_and_gradient(case["settings"], on_policy=case["on_policy"])
    assert loss == pytest.approx(case["loss"], rel=1e-7)
    expected = torch.tensor(case["gradient"], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("case", cases("baseline"))
def test_baselines(case: dict[str, Any]) -> None:
    given, shape = inputs(), (2, -1, inputs()["mask"].shape[1])
    mask, rewards = given[case["mask"]].bool(), torch.tensor(case["token_rewards"], dtype=torch.float64)
    norms = 1 - 2 * given["old_logprobs"].exp() + given["sum_of_squares"]
    # The first token is a turn, whose reward is at it.
    later = torch.arange(mask.shape[1]).clamp(max=1).expand_as(mask)
    turn_rewards = torch.stack([rewards[:, 0], torch.zeros(len(rewards))], dim=1)
    found = ESTIMATORS["optimal_token_baseline"].function(
        EstimatorInputs(
            rewards=rewards.sum(1).view(shape[:2]),
            takes_part=torch.ones(2, len(mask) // 2, dtype=torch.bool),
            config=AdvantageConfig.model_validate(
                {
                    "name": "optimal_token_baseline",
                    "use_leave_one_out_baseline": False,
                    "normalize_rewards": False,
                    "normalize_over": "group",
                }
            ),
            named_rewards={},
            reward_weights={},
            group_ids=("one", "other"),
            num_tokens=mask.sum(1).view(shape[:2]),
            token_mask=mask.view(shape),
            token_turns=later.where(mask, -1).view(shape),
            turn_rewards=turn_rewards.view(2, -1, 2),
            score_norms=norms.view(shape),
        )
    )
    expected = torch.tensor(case["advantages"], dtype=torch.float64)
    torch.testing.assert_close(found.flatten(0, 1), expected, rtol=1e-6, atol=1e-7)


def test_every_new_part_has_cases() -> None:
    objectives = {case["settings"]["objective"] for peer in VALUES["peers"].values() for case in peer["cases"][:-2]}
    assert objectives == {"sapo", "gmpo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov"}
    assert {peer: found["release"] for peer, found in VALUES["peers"].items()} == {
        "verl": "verl==0.9.1",
        "TRL": "trl==1.16.0",
    }


@pytest.mark.parametrize("case", cases("loss"))
def test_every_setting_of_a_case_changes_its_loss(case: dict[str, Any]) -> None:
    """A setting without an effect would compare nothing."""
    loss, _ = loss_and_gradient(case["settings"], on_policy=case["on_policy"])
    unbound = {"ratio_clip_min", "ratio_clip_max"} if case["settings"]["objective"] == "clip_cov" else set()
    for key in case["settings"].keys() - unbound - {"objective", "token_level_loss"}:
        others = (case["settings"][key] * factor for factor in (0.05, 0.5, 2.0))
        changed = [
            loss_and_gradient(case["settings"] | {key: other}, on_policy=case["on_policy"])[0]
            for other in others
            if not (key == "ratio_clip_c" and other < 1) and not (key == "cov_ratio" and other > 1)
        ]
        assert any(other != pytest.approx(loss, rel=1e-4) for other in changed), key
