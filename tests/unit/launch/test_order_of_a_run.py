# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The order in which a run and its engines take the memory of the same GPUs, from the entry point on."""

from pathlib import Path

import pytest

from tests.support.recorded_run import recorded_run

pytestmark = pytest.mark.megatron

STARTS = ["start workers", "empty_cache", "engine starts", "engine sleeps"]
REFIT = ["empty_cache", "weights arrive"]
ROLLOUTS = ["engine wakes", "generate", "engine sleeps"]


@pytest.mark.parametrize("offloads", [False, True])
def test_the_trainer_makes_room_before_engines_start_and_wake(tmp_path: Path, offloads: bool) -> None:
    changes = {"policy__offload_optimizer_for_generation": offloads}

    def with_offload(calls: list[str], *, before: int) -> list[str]:
        """The calls with those that move the state, out before the first emptied cache from a place on."""
        if not offloads:
            return calls
        place = calls.index("empty_cache", before)
        return [*calls[:place], "offload_optimizer", *calls[place:]]

    train = ["onload_optimizer", "train"] if offloads else ["train"]
    step = [*ROLLOUTS, *train, *with_offload(REFIT, before=0)]
    end = ["start_checkpoint", "engine ends"]
    assert recorded_run(tmp_path, **changes) == [*with_offload(STARTS, before=0), *REFIT, *step, *end]
    resumed = ["start workers", "load_checkpoint", *with_offload(STARTS[1:], before=0)]
    found = recorded_run(tmp_path, grpo__max_num_steps=2, **changes)
    assert found == [*resumed, *REFIT, *step, *end], "the checkpoint is loaded before engines take their share"


def test_engines_stay_awake_between_validation_and_rollouts(tmp_path: Path) -> None:
    found = recorded_run(tmp_path, grpo__val_at_start=True, grpo__val_at_end=True)
    validation = ["engine wakes", "generate"]
    assert found == [*STARTS, *REFIT, *validation, *ROLLOUTS, "train", *REFIT, *validation, *found[-2:]]


def test_engines_on_gpus_of_their_own_need_no_room(tmp_path: Path) -> None:
    own = {"cluster__roles": "{generation: {num_nodes: 1, gpus_per_node: 1}}"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nemo_rl_moe.launch.setup.RayCluster", lambda config, beside: beside)
        found = recorded_run(tmp_path, **own)
    assert "empty_cache" not in found
