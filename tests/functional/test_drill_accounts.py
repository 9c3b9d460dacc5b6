# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The accounts of asynchronous drills find what is trained on twice, lost, or not as the queue had it."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nemo_rl_moe.launch.rollouts import SCHEDULE_FILE
from nemo_rl_moe.rollouts.dispatch.schedule import ScheduledGroup, ScheduledStep, line_of
from tests.functional.drill_accounts import Accounts
from tests.functional.drill_records import Logs
from tests.functional.drill_runs import GROUPS_A_STEP, NUM_PROMPTS, STEPS_AN_EPOCH

NUM_STEPS = 2 * STEPS_AN_EPOCH
RESTART = 7


@dataclass
class Made:
    """Records of a run of two epochs, ahead by a step, that began again after step 7 with two groups in its queue.

    Attributes:
        folder: Gets `logs`.
        positions: Of each step's groups.
        versions: Of groups, by position, where they are not one less than their step's.
    """

    folder: Path
    positions: list[list[int]] = field(
        default_factory=lambda: [
            list(range(GROUPS_A_STEP * step, GROUPS_A_STEP * (step + 1))) for step in range(NUM_STEPS)
        ]
    )
    versions: dict[int, int] = field(default_factory=dict)
    num_records: int = NUM_STEPS

    def faults(self) -> list[str]:
        """Write the records, and return what the accounts find."""
        run_folder = self.folder / "logs" / "exp_001"
        checkpoint = run_folder / "checkpoints" / f"step_{RESTART}" / "rollouts"
        checkpoint.mkdir(parents=True)
        queued = [4 * RESTART, 4 * RESTART + 1]
        queue = {
            "version": RESTART,
            "groups": [{"position": position, "version": RESTART - 1, "attempt": 0} for position in queued],
            "open": [{"position": 4 * RESTART + 2}, {"position": 4 * RESTART + 3}],
        }
        (checkpoint / "queue.json").write_text(json.dumps(queue))
        accounts = Accounts(Logs(self.folder))
        accounts.note_restart()
        schedule = []
        for version, positions in enumerate(self.positions):
            groups = []
            for position in positions:
                again = position in (4 * RESTART + 2, 4 * RESTART + 3)
                began = self.versions.get(position, RESTART if again else max(0, version - 1))
                groups.append(ScheduledGroup(position, f"prompt {position % NUM_PROMPTS}", 0, began, version))
            schedule.append(line_of(ScheduledStep(version, tuple(groups)), version + 1))
        (run_folder / SCHEDULE_FILE).write_text("".join(f"{line}\n" for line in schedule))
        lines = [json.dumps({"step": step, "metrics": {}}) for step in range(1, self.num_records + 1)]
        (run_folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
        final = run_folder / "checkpoints" / "final"
        final.mkdir()
        save_file({"weight": torch.ones(1)}, final / "model.safetensors")
        return list(accounts.faults(NUM_STEPS))


def test_a_run_whose_accounts_are_right_has_no_faults(tmp_path: Path) -> None:
    assert Made(tmp_path).faults() == []


def test_a_prompt_in_place_of_another_is_one_twice_and_one_lost(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.positions[9][0] = 3
    assert made.faults() == ["trained on twice: [3]", "never trained on: [36]"]


@pytest.mark.parametrize(
    ("position", "version", "expected"),
    [
        (4 * RESTART, RESTART, "group 28 of the queue did not come back: "),
        (4 * RESTART + 2, RESTART - 1, "group 30 was not drawn again at version 7: "),
    ],
)
def test_queued_groups_come_back_and_others_are_drawn_again(
    tmp_path: Path, position: int, version: int, expected: str
) -> None:
    (found,) = Made(tmp_path, versions={position: version}).faults()
    assert found.startswith(expected)


def test_steps_that_are_missing_are_named(tmp_path: Path) -> None:
    (found,) = Made(tmp_path, num_records=NUM_STEPS - 1).faults()
    assert found.startswith(f"missing are steps [{NUM_STEPS}], recorded [1, 2, ")
