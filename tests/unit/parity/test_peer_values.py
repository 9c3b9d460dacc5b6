# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Losses, gradients, advantages and learning rates against what functions of the peers give for the same inputs.

`peer_values.json` holds the inputs, and for each peer its release and what each of its functions returned, in float64.
The numbers were made by importing these functions from an unchanged checkout (TRL: from PyPI) in a process of its own,
with empty stand-ins for what they import and do not call (Ray, workers, hydra), and calling them with these inputs:

- `policy`: `logprobs` and the others are `[sequences, targets]` with the `mask`; a peer that expects a first token
  without a log-probability got a column of zeros there. TRL's and verl's trainers take advantages and weights as given.
  `GRPOTrainer._compute_loss` and `DPOTrainer._compute_loss` were called with an object in place of the trainer that
  carries the settings, and whose model returns these log-probabilities.
- `preference`: pairs of neighbours, chosen first; TRL got the chosen ones first and the reference's sums.
- `rewards`: `[groups, generations]` of two named rewards; `accuracy` alone where one is compared. verl got responses of
  one token each, as its REINFORCE++ counts tokens.
- `critic`: `[trajectories, tokens]` with the `mask` of trained tokens and a reward at the last one; `returns` are those
  of NeMo-RL's first case. Of NeMo-RL and verl, single functions and classes were called without their module's imports.
- `teacher`: logits of policy and teacher, `[sequences, targets, vocabulary]`; candidates are the teacher's likeliest.
- `schedule`: Megatron-LM's scheduler from 0 to 3e-4 and down to 2e-5, the rate at each tick from 0 on, one tick a step.
  Its training loop does the first step at tick 0, at a rate of 0 where there is a warm-up; ours then begins at tick 1.

Means of theirs divide by a count plus 1e-8, advantages by a standard deviation with another floor or none.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_moe.algorithms.losses.divergence import kl_estimate
from nemo_rl_moe.algorithms.losses.policy_gradient import PolicyGradientLoss
from nemo_rl_moe.algorithms.losses.supervised import PreferenceLoss, sft_loss
from nemo_rl_moe.algorithms.losses.teacher_divergence import candidate_divergence
from nemo_rl_moe.algorithms.losses.value import CLIPPED_FRACTION, ValueLoss
from nemo_rl_moe.config.schema_grpo import AdvantageConfig
from nemo_rl_moe.config.schema_policy import SchedulerConfig
from nemo_rl_moe.distributed.batch import per_token
from nemo_rl_moe.models.interfaces import LossInputs, LossOutputs
from nemo_rl_moe.models.megatron.training.optimizer import build_scheduler
from nemo_rl_moe.rl.gae import generalized_advantages, token_rewards, whitened
from tests.support.grpo_inputs import advantages_of_named, advantages_of_rewards
from tests.support.quick_list import some_of
from tests.support.tiny_model import tiny_policy
from tests.unit.algorithms import policy_loss_reference, preference_reference

VALUES = json.loads((Path(__file__).parent / "peer_values.json").read_text())
EXACT = {"rtol": 1e-7, "atol": 1e-9}


def cases(kind: str) -> list[Any]:
    """The cases of a kind, of all peers, named as peer and function."""
    return [
        pytest.param(case, id=f"{peer}: {case['function']}")
        for peer, found in VALUES["peers"].items()
        for case in found["cases"]
        if case["kind"] == kind
    ]


@cache
def tensors(kind: str) -> dict[str, Tensor]:
    """Inputs in float64."""
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in VALUES["inputs"][kind].items()}


def gradient(outputs: LossOutputs, inputs: LossInputs) -> Tensor:
    """Gradient of the loss by the log-probabilities."""
    (found,) = torch.autograd.grad(outputs.loss, inputs.logprobs)
    return found


def assert_metrics(outputs: LossOutputs, expected: dict[str, float]) -> None:
    """The peer's metrics are among ours, with its values."""
    found = {name: float(outputs.metrics[name][0]) for name in expected}
    assert found == pytest.approx(expected, rel=1e-7, abs=1e-9)


@pytest.mark.parametrize("case", cases("policy"))
def test_policy_losses(case: dict[str, Any]) -> None:
    given = dict(tensors("policy"))
    logprobs, mask = given.pop("logprobs").clone().requires_grad_(), given.pop("mask").bool()
    inputs = policy_loss_reference.inputs_of(logprobs, mask, **given)
    config = policy_loss_reference.config_of(**case["settings"])
    outputs = PolicyGradientLoss(config, prev_is_current=case["on_policy"])(inputs)
    assert outputs.loss.item() == pytest.approx(case["loss"], rel=1e-7)
    if "gradient" in case:
        expected = torch.tensor(case["gradient"], dtype=torch.float64)
        torch.testing.assert_close(gradient(outputs, inputs), expected, **EXACT)
    assert_metrics(outputs, case.get("metrics", {}))


@pytest.mark.parametrize("case", cases("preference"))
def test_preference_losses(case: dict[str, Any]) -> None:
    given = tensors("preference")
    mask = given["mask"].bool()
    reference = given["reference_logprobs"].where(mask, 0.0).sum(dim=1)
    inputs = preference_reference.inputs_of(given["logprobs"].clone().requires_grad_(), mask, reference)
    outputs = PreferenceLoss(preference_reference.config_of(**case["settings"]))(inputs)
    assert outputs.loss.item() == pytest.approx(case["loss"], rel=1e-7)
    expected = torch.tensor(case["gradient"], dtype=torch.float64)
    torch.testing.assert_close(gradient(outputs, inputs), expected, **EXACT)
    assert_metrics(outputs, case["metrics"])


@pytest.mark.parametrize("case", cases("sft"))
def test_supervised_loss(case: dict[str, Any]) -> None:
    given = tensors("preference")
    mask = given["mask"].bool()
    inputs = LossInputs(given["logprobs"].clone().requires_grad_(), mask, int(mask.sum()), len(mask), None, {})
    outputs = sft_loss(inputs)
    assert outputs.loss.item() == pytest.approx(case["loss"], rel=1e-7)
    torch.testing.assert_close(gradient(outputs, inputs), torch.tensor(case["gradient"], dtype=torch.float64), **EXACT)


@pytest.mark.parametrize("case", cases("divergence"))
def test_estimates_of_the_divergence(case: dict[str, Any]) -> None:
    given = tensors("policy")
    found = kl_estimate(given["logprobs"], given["reference_logprobs"], case["type"])
    torch.testing.assert_close(found, torch.tensor(case["values"], dtype=torch.float64), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("case", cases("advantages"))
def test_advantages(case: dict[str, Any]) -> None:
    settings = {"normalize_over": "group"} | case["settings"]
    weights, divisor = settings.pop("weights", None), settings.pop("divisor", "sample")
    config, rewards = AdvantageConfig.model_validate(settings), tensors("rewards")
    if weights is None:
        found = advantages_of_rewards(rewards["accuracy"], config)
    else:
        found = advantages_of_named(torch.stack([*rewards.values()]), weights, config)
    if divisor == "population":  # they divide by the number of values, and ours by one less
        found = found * (found.numel() / (found.numel() - 1)) ** 0.5
    expected = torch.tensor(case["advantages"], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("case", cases("gae"))
def test_generalized_advantages(case: dict[str, Any]) -> None:
    given, settings = tensors("critic"), case["settings"]
    mask, values = given["mask"].bool(), given["values"]
    no_turns = torch.zeros(len(values), 0), torch.full(values.shape, -1)
    rewards = token_rewards(given["rewards"], *no_turns, mask)

    def decayed(decay: float) -> Tensor:
        return generalized_advantages(rewards, values, mask, discount=settings["discount"], decay=decay)

    advantages = decayed(settings["decay"])
    returns = values + (advantages if settings["decay_value"] is None else decayed(settings["decay_value"]))
    if settings["whitened"]:
        advantages = whitened(advantages, mask)
    for found, name in ((advantages, "advantages"), (returns, "returns")):
        expected = torch.tensor(case[name], dtype=torch.float64)
        torch.testing.assert_close(found[mask], expected[mask], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("case", cases("value_loss"))
def test_value_losses(case: dict[str, Any]) -> None:
    given = tensors("critic")
    mask, values = given["mask"].bool(), given["new_values"].clone().requires_grad_()
    columns = {name: per_token(given[of]) for name, of in (("returns", "returns"), ("previous_values", "values"))}
    inputs = LossInputs(torch.zeros_like(values), mask, int(mask.sum()), len(mask), None, columns, values=values)
    outputs = ValueLoss(case["settings"]["clip_range"])(inputs)
    assert outputs.loss.item() == pytest.approx(case["loss"], rel=1e-7)
    (found,) = torch.autograd.grad(outputs.loss, values)
    torch.testing.assert_close(found, torch.tensor(case["gradient"], dtype=torch.float64), **EXACT)
    if "clipped_fraction" in case:
        assert_metrics(outputs, {CLIPPED_FRACTION: case["clipped_fraction"]})


@pytest.mark.parametrize("case", cases("teacher_divergence"))
def test_divergences_from_a_teacher(case: dict[str, Any]) -> None:
    given, settings = tensors("teacher"), dict(case["settings"])
    logits, teacher, mask = given["logits"].clone().requires_grad_(), given["teacher_logits"], given["mask"].bool()
    ids = teacher.topk(settings.pop("num_candidates", teacher.shape[-1]), dim=-1).indices
    of_both = (each.log_softmax(-1).gather(-1, ids) for each in (logits, teacher))
    loss = candidate_divergence(*of_both, settings["kl_type"], settings["mixed_kl_weight"])[mask].mean()
    assert loss.item() == pytest.approx(case["loss"], rel=1e-7)
    (found,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(found, torch.tensor(case["gradient"], dtype=torch.float64), **EXACT)


@pytest.mark.parametrize("case", some_of(cases("schedule"), 4))
def test_learning_rates(case: dict[str, Any]) -> None:
    expected = case["rates"][1:] if case["settings"]["lr_warmup_iters"] else case["rates"]
    policy = tiny_policy(optimizer__lr=3e-4, optimizer__min_lr=2e-5)
    chosen = policy.megatron_cfg.model_copy(update={"scheduler": SchedulerConfig(**case["settings"])})
    optimizer: Any = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    scheduler = build_scheduler(policy.model_copy(update={"megatron_cfg": chosen}), optimizer, num_steps=99)
    found = []
    for _ in expected:
        found.append(optimizer.param_groups[0]["lr"])
        scheduler.step(1)
    assert found == pytest.approx(expected, rel=1e-12)


def test_every_peer_and_every_kind_has_cases() -> None:
    kinds = {peer: {case["kind"] for case in found["cases"]} for peer, found in VALUES["peers"].items()}
    assert kinds == {
        "NeMo-RL": {
            *("policy", "preference", "sft", "advantages", "divergence"),
            *("gae", "value_loss", "teacher_divergence"),
        },
        "verl": {"policy", "advantages", "divergence", "gae", "value_loss"},
        "TRL": {"policy", "preference", "teacher_divergence"},
        "Megatron-LM": {"schedule"},
    }
    assert all(found["release"] for found in VALUES["peers"].values())


@pytest.mark.parametrize("bound", ["ratio_clip_min", "ratio_clip_max", "ratio_clip_c", "reference_policy_kl_penalty"])
def test_inputs_reach_what_they_are_compared_by(bound: str) -> None:
    """A case that no setting changes would compare nothing."""
    given = dict(tensors("policy"))
    logprobs, mask = given.pop("logprobs"), given.pop("mask").bool()
    inputs = policy_loss_reference.inputs_of(logprobs, mask, **given)
    plain = {"ratio_clip_min": 0.2, "ratio_clip_max": 0.28, "ratio_clip_c": None, "reference_policy_kl_penalty": 0.0}
    other = {"ratio_clip_min": 0.21, "ratio_clip_max": 0.29, "ratio_clip_c": 1.2, "reference_policy_kl_penalty": 0.1}
    losses = [
        PolicyGradientLoss(policy_loss_reference.config_of(**settings), prev_is_current=False)(inputs).loss.item()
        for settings in (plain, plain | {bound: other[bound]})
    ]
    assert losses[0] != pytest.approx(losses[1], rel=1e-4)
