# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Validation by generation: the same prompts and random numbers each time, and what it reports."""

from dataclasses import dataclass, field, replace

import pytest

from nemo_rl_moe.algorithms.grpo_batch import failure_rule
from nemo_rl_moe.algorithms.grpo_metrics import Validator
from nemo_rl_moe.rollouts.source import TRAINING_SEEDS
from tests.support.grpo_fakes import SAMPLING, FakeEngine, FakeRewardFunction, make_runner, prompts, small_config


@dataclass
class Validation:
    """A validator over fakes."""

    overrides: tuple[str, ...] = ()
    num_prompts: int = 3
    engine: FakeEngine = field(default_factory=FakeEngine)
    reward_function: FakeRewardFunction = field(default_factory=FakeRewardFunction)

    def __post_init__(self) -> None:
        self.runner = make_runner(self.engine, self.reward_function)
        config = small_config(*self.overrides)
        held_out = prompts(self.num_prompts, "val")
        self.validate = Validator(config.grpo, self.runner, held_out, SAMPLING, failure_rule(config))


def test_every_validation_asks_the_same() -> None:
    run = Validation()
    first, second = run.validate(), run.validate()
    assert run.engine.requests[0] == run.engine.requests[1]
    assert first["val/reward"] == second["val/reward"]
    assert [found.sample_id for found in run.validate.trajectories] == [f"val:{index}" for index in (0, 0, 1, 1, 2, 2)]


def test_seeds_are_not_those_of_training() -> None:
    run = Validation()
    run.validate()
    for step in range(3):
        run.runner.evaluate(prompts(3), 2, SAMPLING, (11, TRAINING_SEEDS, step, 0))
    validation, *training = (set(request.seeds) for request in run.engine.requests)
    assert all(validation.isdisjoint(seeds) for seeds in training)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_only_the_temperature_differs_from_training(temperature: float) -> None:
    run = Validation((f"grpo.val_temperature={temperature}", "grpo.val_num_generations=1"))
    run.validate()
    assert run.engine.requests[0].sampling == replace(SAMPLING, temperature=temperature)
    assert SAMPLING.temperature == 0.8


@pytest.mark.parametrize(("limit", "expected"), [("null", 3), ("2", 2), ("9", 3)])
def test_how_many_prompts(limit: str, expected: int) -> None:
    run = Validation((f"grpo.max_val_samples={limit}",))
    run.validate()
    assert len(run.engine.requests[0].prompts) == 2 * expected
    assert run.validate.trajectories[0].sample_id == "val:0"


def test_what_is_reported() -> None:
    # Of the six responses to three prompts, the second, third and fourth are right.
    verdicts = iter([0.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    run = Validation(reward_function=FakeRewardFunction(reward=lambda _: next(verdicts)))
    metrics = run.validate()
    timings = {name: metrics.pop(name) for name in list(metrics) if name.startswith("timing/")}
    assert timings.keys() == {"timing/validation/seconds", "timing/validation/tokens_per_second"}
    lengths = [found.num_sampled_tokens for found in run.validate.trajectories]
    assert metrics == {
        "val/reward": 0.5,
        "val/reward_std": pytest.approx(0.3**0.5),
        "val/accuracy": 0.5,
        "val/mean_gen_tokens_per_sample": pytest.approx(sum(lengths) / 6),
        "val/max_gen_tokens_per_sample": max(lengths),
        "val/truncation_rate": 0.0,
        "val/env/num_errors": 0.0,
        "val/env/num_timeouts": 0.0,
        "val/env/num_died": 0.0,
        "val/env/failed_share": 0.0,
        "val/pass_at_2": pytest.approx(2 / 3),
    }
