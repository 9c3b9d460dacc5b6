# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Asynchronous rollouts of several environments: the synchronous order, kept over a checkpoint with its queue."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from nemo_rl_moe.checkpoints.state import LoopState
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.data.mixture import MixtureLoader
from nemo_rl_moe.launch.rollouts import plan_rollouts, running_source, state_at
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rollouts.dispatch.source import SampledGroups
from nemo_rl_moe.rollouts.environment import Environment, SingleTurn
from nemo_rl_moe.rollouts.loops import LoopThread
from nemo_rl_moe.rollouts.run_environment import RunEnvironment
from nemo_rl_moe.rollouts.runner import RolloutRunner
from tests.support.grpo_fakes import SAMPLING, FakeRewardFunction, as_numbers, from_numbers, prompts, small_config
from tests.support.scripted_rollouts import ScriptedEngine, TwoTurns

Step = list[tuple[str, str, int]]


def loader() -> MixtureLoader:
    datasets = {
        name: [replace(each, environment=name) for each in prompts(count, name)]
        for name, count in (("plain", 5), ("turns", 3))
    }
    return MixtureLoader(datasets, {"plain": 2.0, "turns": 1.0}, 2, 3, shuffle=True)


def config() -> GRPOMasterConfig:
    return small_config(
        "grpo.max_num_epochs=2",
        "grpo.rollouts.mode=asynchronous",
        "grpo.rollouts.max_staleness=2",
        "loss_fn.importance_sampling_correction=truncated",
        "policy.generation.backend=vllm",
    )


def runner() -> RolloutRunner:
    drivers: dict[str, Environment] = {"plain": SingleTurn(), "turns": TwoTurns()}
    environments = {name: RunEnvironment(driver, FakeRewardFunction()) for name, driver in drivers.items()}
    return RolloutRunner(ScriptedEngine(), environments, as_numbers, from_numbers, 100, LoopThread())


@contextmanager
def source_at(folder: Path, step: int = 0, checkpoint: Path | None = None) -> Iterator[SampledGroups]:
    chosen, plan = config(), plan_rollouts(config())
    state = state_at(chosen, LoopState(step, step), checkpoint, loader())
    with (
        closing(runner()) as made,
        running_source(
            chosen, plan, made, loader(), SAMPLING, folder, state, lambda text: None, lambda text: None
        ) as source,
    ):
        source.updated(step)
        yield source


def next_step(source: SampledGroups, step: int) -> Step:
    """Return sample, environment and turns of each trajectory of the next step, which the engine then has."""
    groups = source.next(step, PhaseClock())
    source.update_pending(step + 1)
    source.updated(step + 1)
    return [(each.sample_id, each.environment, each.num_turns) for each in groups.trained]


def test_a_mixture_has_its_order_and_goes_on_with_its_queue(tmp_path: Path) -> None:
    rounds = [found for epoch in range(2) for found in loader().epoch(epoch)]
    expected: list[Step] = [
        [(each.sample_id, each.environment, 1 + (each.environment == "turns")) for each in found for _ in range(3)]
        for found in rounds
    ]
    with source_at(tmp_path) as source:
        assert [next_step(source, step) for step in range(3)] == expected[:3]
        checkpoint = tmp_path / "checkpoint"
        checkpoint.mkdir()
        source.state(3).write(checkpoint)
    with source_at(tmp_path, 3, checkpoint) as source:
        assert [next_step(source, step) for step in range(3, len(rounds))] == expected[3:]
        assert source.is_used_up
