# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A run goes on from a checkpoint: to the last bit in the layout that wrote it, within rounding in others."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl_moe.models.megatron.checkpoint.optimizer_state import set_num_updates
from tests.support.checkpoint_run import (
    Steps,
    adam_steps_after_loading,
    load_and_train,
    load_with_a_further_generator,
    save_once,
    spoil_save_and_train,
    train_and_save,
)
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import full, slow
from tests.support.tiny_model import layout, tiny_policy
from tests.support.training_run import RunSettings
from tests.unit.models.megatron.tiny_trainers import EXPERT_BIAS, ZERO_1

SAVE_AFTER, NUM_STEPS = 2, 4
BFLOAT16 = {"precision": "bfloat16"}
MOVED_BIAS = {**EXPERT_BIAS, "moe_router_bias_update_rate": 0.05}


@dataclass(frozen=True)
class Job:
    """Ranks, their layout, and further settings of the policy and of the model."""

    num_ranks: int = 1
    sizes: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)

    def run_settings(self) -> RunSettings:
        policy = tiny_policy(self.num_ranks, **layout(**self.sizes), **self.settings)
        return RunSettings(policy, model=self.model)

    def __str__(self) -> str:
        sizes = "".join(f"{name}{size}" for name, size in self.sizes.items())
        return "-".join(
            filter(None, [f"{self.num_ranks}", sizes, "zero" if ZERO_1.items() <= self.settings.items() else ""])
        )


Written = tuple[Path, Steps]
"""A checkpoint, and what the run that saved it has measured after it."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Job], Written]:
    """Runs each job once; the readers leave its folder as it is."""
    done: dict[str, Written] = {}

    def save(job: Job) -> Written:
        if repr(job) not in done:
            folder = tmp_path_factory.mktemp("written")
            arguments = job.run_settings(), str(folder), SAVE_AFTER, NUM_STEPS
            found: list[Steps] = run_ranks(train_and_save, job.num_ranks, *arguments)
            assert all(steps == found[0] for steps in found)
            done[repr(job)] = folder, found[0][SAVE_AFTER:]
        return done[repr(job)]

    return save


def resume(job: Job, folder: Path, *, with_optimizer: bool = True) -> Steps:
    """Return the measurements of a run that continues from there."""
    found: list[Steps] = run_ranks(
        load_and_train, job.num_ranks, job.run_settings(), str(folder), SAVE_AFTER, NUM_STEPS, with_optimizer
    )
    return found[0]


def largest_difference(found: Steps, expected: Steps) -> float:
    """Relative for what is above 1; overload compares ranks, so it depends on the layout."""
    return max(
        abs(step[name] - value) / max(1.0, abs(value))
        for step, wanted in zip(found, expected, strict=True)
        for name, value in wanted.items()
        if "overload" not in name
    )


@pytest.mark.parametrize(
    "job",
    [
        slow(Job()),
        slow(Job(2, {}, ZERO_1)),
        Job(2, {"ep": 2}, {**ZERO_1, **MOVED_BIAS}),
        slow(Job(2, {"pp": 2, "vpp": 2})),
        full(Job(2, {"tp": 2}, ZERO_1)),
        slow(Job(2, {}, {**BFLOAT16, **ZERO_1})),
        slow(Job(2, {}, BFLOAT16)),
        slow(Job(2, {}, {"layer_spec": "local"})),
        # Draws random numbers in every step.
        slow(Job(2, {}, {"moe_router_force_load_balancing": True})),
        slow(Job(4, {"tp": 2, "pp": 2}, ZERO_1)),
        slow(Job(4, {"pp": 2, "ep": 2}, ZERO_1)),
    ],
    ids=str,
)
def test_the_same_layout_goes_on_to_the_last_bit(job: Job, written: Callable[[Job], Written]) -> None:
    folder, steps = written(job)
    assert resume(job, folder) == steps
    assert len({step["lr"] for step in steps}) == NUM_STEPS - SAVE_AFTER, "the schedule moves"


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        slow(Job(), Job(2, {"ep": 2})),
        full(Job(), Job(2, {"pp": 2})),
        slow(Job(), Job(2, {"tp": 2})),
        slow(Job(1, {}, ZERO_1), Job(2, {}, ZERO_1)),
        full(Job(2, {"ep": 2}, ZERO_1), Job(1, {}, ZERO_1)),
        slow(Job(2, {"pp": 2}, ZERO_1), Job(2, {"ep": 2}, ZERO_1)),
        slow(Job(2, {}, ZERO_1), Job(2, {"tp": 2}, ZERO_1)),
        slow(Job(2, {}, ZERO_1), Job(2)),
        slow(Job(2), Job(2, {}, ZERO_1)),
        # Vocabulary rows that only fill up, tied embeddings, Megatron-Core's own experts.
        full(Job(2, {"tp": 2}, ZERO_1, {"vocab_size": 65}), Job(1, {}, {}, {"vocab_size": 65})),
        (Job(2, {"pp": 2}, ZERO_1, {"tie_word_embeddings": True}), Job(1, {}, {}, {"tie_word_embeddings": True})),
        slow(Job(1, {}, {"layer_spec": "local"}), Job(2, {"ep": 2})),
        slow(Job(), Job(2, {"pp": 2, "vpp": 2})),
        full(Job(2, {"pp": 2, "first": 3}, ZERO_1), Job(2, {"pp": 2, "last": 3}, ZERO_1)),
        slow(Job(2, {"tp": 2, "etp": 2}), Job()),
        slow(Job(1, {}, ZERO_1), Job(4, {"pp": 2, "ep": 2}, ZERO_1)),
        slow(Job(4, {"tp": 2, "pp": 2}, ZERO_1), Job(1, {}, ZERO_1)),
        # The bias moves with its experts.
        full(Job(2, {}, MOVED_BIAS), Job(2, {"ep": 2}, MOVED_BIAS)),
    ],
    ids=str,
)
def test_another_layout_goes_on_within_rounding(writer: Job, reader: Job, written: Callable[[Job], Written]) -> None:
    folder, steps = written(writer)
    assert largest_difference(resume(reader, folder), steps) < 5e-6


@pytest.mark.full
@pytest.mark.parametrize(
    "settings", [ZERO_1, *(slow(each) for each in ({}, BFLOAT16, {**BFLOAT16, **ZERO_1}))], ids=str
)
def test_every_parameter_has_a_step_count_of_its_own(
    settings: Mapping[str, Any], written: Callable[[Job], Written]
) -> None:
    """A shared count would grow by as many as it has owners; a lost one would begin Adam's bias correction anew."""
    job = Job(2, {}, settings)
    folder = str(written(job)[0])
    for counts, num_tensors, num_updates in run_ranks(adam_steps_after_loading, 2, job.run_settings(), folder):
        assert set(counts) == {SAVE_AFTER + 1.0}
        assert num_tensors == len(counts) > 1
        assert num_updates == SAVE_AFTER + 1


def test_an_optimizer_that_counts_by_group_is_reported_before_its_first_step() -> None:
    """Transformer Engine's and Apex's optimizers do so, and make the count in their first step."""
    optimizer = torch.optim.SGD([torch.zeros(2)])
    set_num_updates(SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=optimizer)]), 7)
    assert [group["step"] for group in optimizer.param_groups] == [7]


@pytest.mark.full
@pytest.mark.parametrize("job", [Job(), slow(Job(2, {}, ZERO_1)), slow(Job(1, {}, BFLOAT16))], ids=str)
def test_a_checkpoint_from_before_the_first_update(job: Job, tmp_path: Path) -> None:
    """The first update was left out: the optimizer had no state yet when it was saved."""
    settings = job.run_settings()
    expected = run_ranks(spoil_save_and_train, job.num_ranks, settings, str(tmp_path), 3)
    found = run_ranks(load_and_train, job.num_ranks, settings, str(tmp_path), 1, 3)
    assert found == expected
    assert len({step["loss"] for step in found[0]}) == 2, "the updates are done"


def test_random_states_that_a_checkpoint_lacks_stay_as_they_are(tmp_path: Path) -> None:
    settings = Job().run_settings()
    assert run_ranks(save_once, 1, settings, str(tmp_path)) == [None]
    assert run_ranks(load_with_a_further_generator, 1, settings, str(tmp_path)) == [True]


def test_weights_alone(written: Callable[[Job], Written]) -> None:
    """The loss goes on where it was; the optimizer begins anew, so the step after that differs."""
    folder, expected = written(Job())
    found = resume(Job(2, {"ep": 2}), folder, with_optimizer=False)
    assert math.isclose(found[0]["loss"], expected[0]["loss"], rel_tol=1e-6)
    assert not math.isclose(found[-1]["loss"], expected[-1]["loss"], rel_tol=1e-4)
