# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Estimators and objectives of the user's own."""

import inspect

import pytest
import torch

from nemo_rl_moe.algorithms.custom_estimator import KEY as ESTIMATOR
from nemo_rl_moe.algorithms.custom_estimator import check_estimator
from nemo_rl_moe.algorithms.losses.custom_objective import KEY as OBJECTIVE
from nemo_rl_moe.algorithms.losses.custom_objective import check_objective
from nemo_rl_moe.algorithms.losses.policy_gradient import PolicyGradientLoss
from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.errors import ConfigurationError, UserCodeError
from tests.support import custom_parts
from tests.support.custom_parts import NAME
from tests.support.grpo_inputs import advantages_of_rewards
from tests.unit.algorithms.policy_loss_reference import config_of, random_inputs


def config_with(estimator: str, *more: str) -> GRPOMasterConfig:
    settings = [f"{ESTIMATOR}={estimator}", "grpo.num_prompts_per_step=16", "grpo.num_generations_per_prompt=8", *more]
    return load_grpo_config("grpo_tiny_moe.yaml", settings, check_paths=False)


def test_advantages_are_those_of_the_function() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.5], [2.0, 2.0, 2.0]])
    found = advantages_of_rewards(rewards, config_with(f"{NAME}:from_median").grpo.adv_estimator)
    assert found.tolist() == [[0.5, -0.5, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("corrected", ["none", "truncated"])
def test_twice_the_loss_is_twice_the_loss_with_all_that_is_around_it(corrected: str) -> None:
    """Without a clip, that of REINFORCE on policy; corrections, penalty and metrics stay as they are."""
    changes = {"importance_sampling_correction": corrected, "ratio_clip_min": 1.0, "ratio_clip_max": 1e6}
    clipped, own = (
        PolicyGradientLoss(config_of(objective=objective, ratio_clip_c=None, **changes), prev_is_current=False)
        for objective in ("clipped", f"{NAME}:doubled")
    )
    inputs = random_inputs(seed=3)
    inputs.logprobs.requires_grad_()
    expected, found = clipped(inputs), own(inputs)
    torch.testing.assert_close(found.loss, 2 * expected.loss)
    assert found.metrics.keys() == expected.metrics.keys()
    gradients = [torch.autograd.grad(outputs.loss, inputs.logprobs)[0] for outputs in (expected, found)]
    torch.testing.assert_close(gradients[1], 2 * gradients[0])


def check(key: str, name: str) -> None:
    """Check a function as an estimator, or as an objective."""
    if key == ESTIMATOR:
        check_estimator(config_with(name))
    else:
        check_objective(config_of(objective=name))


def place_of(name: str) -> str:
    """The line of the users' file at which one of its functions raises."""
    source = inspect.getsource(custom_parts).splitlines()
    number = 1 + next(index for index, line in enumerate(source) if f"# {name}" in line)
    return f" (custom_parts.py:{number})"


@pytest.mark.parametrize(
    ("key", "name", "problem"),
    [
        (ESTIMATOR, "form_median", f"{NAME}:form_median: {NAME} has no form_median; did you mean from_median?"),
        (ESTIMATOR, "NOT_CALLABLE", f"{NAME}:NOT_CALLABLE is 3 (int), expected a function"),
        (ESTIMATOR, "one_for_each_group", "returned shape [16], expected a tensor of shape [16, 8]: one advantage for"),
        (ESTIMATOR, "divided_by_the_spread", "returned NaN or infinity, expected finite advantages"),
        (ESTIMATOR, "raising", "raised in a trial with rewards of 0 and 1: KeyError: 'no such key'"),
        (ESTIMATOR, "two_arguments", "cannot be called with the EstimatorInputs: missing a required argument: 'conf"),
        (OBJECTIVE, "mean_loss", "returned shape [], expected a tensor of shape [2, 3]: the loss of each token"),
        (OBJECTIVE, "detached", "returned a loss without a gradient, expected one that depends on logprobs or ratio"),
        (OBJECTIVE, "raising", "raised in a trial on three tokens: KeyError: 'no such key'"),
        (OBJECTIVE, "leaving", "raised in a trial on three tokens: SystemExit: 3"),
        (OBJECTIVE, "without_numbers", "returned a loss whose value or gradient is NaN or infinite in a trial"),
        (OBJECTIVE, "two_arguments", "cannot be called with the ObjectiveInputs: missing a required argument: 'conf"),
    ],
)
def test_what_cannot_be_used_is_one_line(key: str, name: str, problem: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        check(key, f"{NAME}:{name}")
    (line,) = error.value.problems
    assert line.startswith(f"{key}: {NAME}:{name}")
    assert problem in line


def test_a_module_that_is_not_there_is_one_line() -> None:
    problem = "no_such_module:doubled: there is no module no_such_module, neither installed nor in the working folder"
    with pytest.raises(ConfigurationError, match=f"^{OBJECTIVE}: {problem}"):
        check(OBJECTIVE, "no_such_module:doubled")


@pytest.mark.parametrize("key", [ESTIMATOR, OBJECTIVE])
@pytest.mark.parametrize("name", ["raising", "raising_below"])
def test_an_error_has_the_line_of_the_users_file(name: str, key: str) -> None:
    """Also where the file calls a library that raises."""
    with pytest.raises(ConfigurationError) as error:
        check(key, f"{NAME}:{name}")
    assert str(error.value).endswith(place_of(name))


def test_what_can_be_used_passes() -> None:
    for key, name in ((ESTIMATOR, f"{NAME}:from_median"), (ESTIMATOR, "grpo"), (OBJECTIVE, f"{NAME}:doubled")):
        check(key, name)
    check_objective(config_of())


@pytest.mark.parametrize("ratio", [f"{OBJECTIVE}=gmpo", "loss_fn.sequence_level_importance_ratios=true"])
def test_advantages_of_tokens_do_not_share_a_ratio(ratio: str) -> None:
    changes = ["loss_fn.token_level_loss=false", ratio]
    check_estimator(config_with(f"{NAME}:from_median", *changes))
    check_estimator(config_with(f"{NAME}:from_median_of_tokens"))
    with pytest.raises(ConfigurationError) as error:
        check_estimator(config_with(f"{NAME}:from_median_of_tokens", *changes))
    (line,) = error.value.problems
    assert line.startswith(f"{ratio.partition('=')[0]}: got ")
    assert f" with {ESTIMATOR} {NAME}:from_median_of_tokens, which gives an advantage to each token: " in line


@pytest.mark.parametrize("name", ["raising", "raising_below"])
def test_an_error_in_a_run_begins_with_key_value_and_the_users_line(name: str) -> None:
    """What passes on three tokens may still fail on those of a run."""
    reference = f"{NAME}:{name}"
    loss = PolicyGradientLoss(config_of(objective=reference), prev_is_current=False)
    for key, call in (
        (ESTIMATOR, lambda: advantages_of_rewards(torch.ones(2, 2), config_with(reference).grpo.adv_estimator)),
        (OBJECTIVE, lambda: loss(random_inputs(seed=3))),
    ):
        with pytest.raises(UserCodeError) as error:
            call()
        first, second, *_ = str(error.value).splitlines()
        assert first.startswith(f"{key}: {reference} raised ")
        assert first.endswith(place_of(name))
        assert second == "Traceback (most recent call last):"


def test_a_loss_of_the_wrong_shape_in_a_run_is_one_line() -> None:
    reference = f"{NAME}:mean_loss"
    with pytest.raises(UserCodeError) as error:
        PolicyGradientLoss(config_of(objective=reference), prev_is_current=False)(random_inputs(seed=3))
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{OBJECTIVE}: {reference} returned shape [], expected a tensor of shape ")
