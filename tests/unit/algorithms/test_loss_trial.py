# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Loss functions of a custom algorithm are tried before anything starts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nemo_rl_moe.algorithms.losses.policy_gradient import PolicyGradientLoss
from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.algorithms.losses.trial import check_losses
from nemo_rl_moe.algorithms.losses.value import ValueLoss
from nemo_rl_moe.config.algorithm import ALGORITHMS, Algorithm
from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.distributed.run_process import StopSignals
from nemo_rl_moe.errors import EXIT_BAD_INPUT, ConfigurationError
from nemo_rl_moe.launch.start import RunLaunch, launch_run
from nemo_rl_moe.metrics import Reduction
from nemo_rl_moe.models.interfaces import LossInputs, LossOutputs
from tests.unit.algorithms.policy_loss_reference import config_of


def likelihood(inputs: LossInputs, **metrics: Any) -> LossOutputs:
    weighted = inputs.logprobs.where(inputs.token_mask, 0.0) * inputs.per_target("weights_of_my_own")
    return LossOutputs(-weighted.sum() / inputs.global_valid_tokens, metrics)


def with_a_metric_per_token(inputs: LossInputs) -> LossOutputs:
    return likelihood(inputs, lowest=(inputs.logprobs.detach(), Reduction.MIN))


def without_a_reduction(inputs: LossInputs) -> LossOutputs:
    return likelihood(inputs, lowest=inputs.logprobs.detach().min())


def with_a_reduction_by_name(inputs: LossInputs) -> LossOutputs:
    return likelihood(inputs, lowest=(inputs.logprobs.detach().min(), "min"))


def without_a_dict(inputs: LossInputs) -> LossOutputs:
    return replace(likelihood(inputs), metrics=None)  # type: ignore[arg-type]


def without_a_gradient(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(likelihood(inputs).loss.detach(), {})


def raising(inputs: LossInputs) -> LossOutputs:
    raise KeyError("no such key")


def with_losses(*losses: object, reference: str | None = "mine:OWN") -> Algorithm:
    return replace(ALGORITHMS["grpo"], name="own", reference=reference, losses=lambda config: losses)  # type: ignore[arg-type,return-value]


@pytest.fixture
def config() -> GRPOMasterConfig:
    return load_grpo_config("grpo_tiny_moe.yaml", check_paths=False)


def test_losses_that_can_be_used_pass(config: GRPOMasterConfig) -> None:
    algorithm = with_losses(
        likelihood,
        sft_loss,
        ValueLoss(clip_range=0.5),
        PolicyGradientLoss(config_of(reference_policy_kl_penalty=0.1, entropy_bonus=0.1), prev_is_current=False),
    )
    check_losses(algorithm, config)
    check_losses(replace(algorithm, losses=ALGORITHMS["grpo"].losses), config)
    check_losses(with_losses(raising, reference=None), config)  # those of this package have tests


@pytest.mark.parametrize(
    ("loss_function", "problem"),
    [
        (with_a_metric_per_token, "returned the metric 'lowest' of shape [2, 3], expected a tensor of shape []"),
        (
            without_a_reduction,
            "returned the metric 'lowest' as tensor(-2.) (Tensor), expected a tensor of shape [] with",
        ),
        (
            with_a_reduction_by_name,
            "returned the metric 'lowest' as (tensor(-2.), 'min') (tuple), expected a tensor of",
        ),
        (without_a_dict, "returned metrics as None (NoneType), expected a dict"),
        (without_a_gradient, "returned a loss without a gradient, expected one that depends on the log-probabilities"),
        (raising, "raised in a trial on three tokens: KeyError: 'no such key' (test_loss_trial.py:"),
    ],
)
def test_what_cannot_be_used_is_named(
    config: GRPOMasterConfig, loss_function: Callable[[LossInputs], LossOutputs], problem: str
) -> None:
    with pytest.raises(ConfigurationError) as error:
        check_losses(with_losses(likelihood, loss_function), config)
    (line,) = error.value.problems
    name = f"{__name__}:{loss_function.__name__}"
    assert line.startswith(f"algorithm: mine:OWN: its loss function {name} {problem}")


def test_losses_that_are_none_are_named(config: GRPOMasterConfig) -> None:
    with pytest.raises(ConfigurationError, match="mine:OWN: one of its losses is 3 \\(int\\), expected a function"):
        check_losses(with_losses(3), config)
    with pytest.raises(ConfigurationError, match="mine:OWN: its losses raised ZeroDivisionError"):
        check_losses(replace(with_losses(), losses=lambda config: 1 // 0), config)  # type: ignore[arg-type,return-value]


def test_a_run_ends_with_code_2_before_anything_starts(
    config: GRPOMasterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(config: GRPOMasterConfig, run: object) -> None:
        pytest.fail("the run was started")

    class OwnMasterConfig(GRPOMasterConfig):
        pass

    own = replace(with_losses(with_a_metric_per_token), run=run, config_class=OwnMasterConfig)
    monkeypatch.setitem(ALGORITHMS, "own", own)
    with pytest.raises(ConfigurationError, match="the metric 'lowest' of shape") as error, StopSignals() as signals:
        launch_run(OwnMasterConfig.model_construct(**dict(config)), RunLaunch("id"), signals)
    assert error.value.exit_code == EXIT_BAD_INPUT
