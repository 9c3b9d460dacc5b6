# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Asynchronous rollouts of several environments: the synchronous order, kept over a checkpoint with its queue."""

from dataclasses import replace
from pathlib import Path

from nemo_rl_moe.data.mixture import MixtureLoader
from nemo_rl_moe.rollouts.dispatch.source import SampledGroups
from nemo_rl_moe.rollouts.environment import Environment, SingleTurn
from nemo_rl_moe.rollouts.loops import LoopThread
from nemo_rl_moe.rollouts.run_environment import RunEnvironment
from nemo_rl_moe.rollouts.runner import RolloutRunner
from tests.support.grpo_fakes import FakeRewardFunction, as_numbers, from_numbers, prompts
from tests.support.scripted_rollouts import ScriptedEngine, TwoTurns
from tests.unit.rollouts.dispatch.test_groups_of_a_run import groups_of_step, source_of


def loader() -> MixtureLoader:
    datasets = {
        name: [replace(each, environment=name) for each in prompts(count, name)]
        for name, count in (("plain", 5), ("turns", 3))
    }
    return MixtureLoader(datasets, {"plain": 2.0, "turns": 1.0}, 2, 3, shuffle=True)


def runner() -> RolloutRunner:
    drivers: dict[str, Environment] = {"plain": SingleTurn(), "turns": TwoTurns()}
    environments = {name: RunEnvironment(driver, FakeRewardFunction()) for name, driver in drivers.items()}
    return RolloutRunner(ScriptedEngine(), environments, as_numbers, from_numbers, 100, LoopThread())


def trained(source: SampledGroups, steps: range) -> list[list[tuple[str, str, int]]]:
    """Return sample, environment and turns of each trajectory of steps."""
    found = [groups_of_step(source, step).trained for step in steps]
    return [[(each.sample_id, each.environment, each.num_turns) for each in of_step] for of_step in found]


def test_a_mixture_has_its_order_and_goes_on_with_its_queue(tmp_path: Path) -> None:
    overrides = ("grpo.rollouts.max_staleness=2", "loss_fn.importance_sampling_correction=truncated")
    rounds = [found for epoch in range(2) for found in loader().epoch(epoch)]
    expected = [
        [(each.sample_id, each.environment, 1 + (each.environment == "turns")) for each in found for _ in range(3)]
        for found in rounds
    ]
    with source_of(runner(), tmp_path, *overrides, rounds=loader()) as source:
        assert trained(source, range(3)) == expected[:3]
        checkpoint = tmp_path / "checkpoint"
        checkpoint.mkdir()
        source.state(3).write(checkpoint)
    with source_of(runner(), tmp_path, *overrides, rounds=loader(), step=3, checkpoint=checkpoint) as source:
        assert trained(source, range(3, len(rounds))) == expected[3:]
        assert source.is_used_up
