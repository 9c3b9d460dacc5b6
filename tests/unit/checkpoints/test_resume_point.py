# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Where a run starts: the newest checkpoint, its own one after a failure, or the beginning; and what is told."""

from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.checkpoints.resume import ResumePoint, find_resume_point
from nemo_rl_moe.config.loading import load_any_config
from nemo_rl_moe.errors import CheckpointError
from tests.support.saving_run import Run

SHARED = "checkpointing.checkpoint_dir={}/shared"
NEVER = "checkpointing.resume=never"


class Place:
    """A log folder, and a folder of checkpoints that runs share."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.warnings: list[str] = []

    def overrides(self, *overrides: str, shared: bool) -> list[str]:
        """Where this place is, and further overrides."""
        directory = SHARED.format(self.folder) if shared else "checkpointing.checkpoint_dir=null"
        return [f"logger.log_dir={self.folder / 'logs'}", directory, *overrides]

    def run(self, number: int, *overrides: str, shared: bool = False, **changes: Any) -> Run:
        """A run in a folder of its own."""
        run_folder = self.folder / "logs" / f"exp_{number:03d}"
        run_folder.mkdir(parents=True, exist_ok=True)
        (run_folder / "config.yaml").write_text("")
        return Run(run_folder, *self.overrides("checkpointing.keep_top_k=null", *overrides, shared=shared), **changes)

    def find(
        self,
        *overrides: str,
        run_id: str = "new",
        attempt: int = 1,
        shared: bool = False,
        name: str = "sft_tiny_moe.yaml",
    ) -> ResumePoint | None:
        """Where a run would start."""
        self.warnings.clear()
        config = load_any_config(name, self.overrides(*overrides, shared=shared), check_paths=False)
        return find_resume_point(config, run_id, attempt, self.warnings.append)

    def found(self, *overrides: str, **arguments: Any) -> ResumePoint:
        """Where a run goes on."""
        point = self.find(*overrides, **arguments)
        assert point is not None
        return point


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def saved(run: Run, *steps: int) -> Run:
    for step in steps:
        run.save(step)
    return run


def test_nothing_to_go_on_from(place: Place) -> None:
    assert place.find() is None
    assert place.find(shared=True) is None
    place.run(1)
    assert place.find() is None
    assert place.find("checkpointing.enabled=false") is None
    assert not (place.folder / "shared").exists(), "nothing is written where nothing is found"
    assert place.warnings == []


def test_the_newest_run_that_has_a_checkpoint(place: Place) -> None:
    saved(place.run(1), 30)
    saved(place.run(999), 5)
    newest = saved(place.run(1000), 10, 20)
    place.run(1001)  # has saved nothing
    point = place.found()
    assert (point.step, point.policy_folder) == (20, newest.store.path_of(20) / "policy")
    assert point.run_folder == place.folder / "logs" / "exp_1000"
    assert place.warnings == []
    assert point.summary(50) == f"going on from {point.folder}: 20 of 50 steps are done"
    assert "20 of 20 steps are done. For more of them set a higher sft.max_num_steps" in point.summary(20)
    assert place.find(NEVER) is None
    assert place.warnings == []


def test_the_newest_of_a_shared_folder(place: Place) -> None:
    saved(place.run(3, shared=True), 10, 20)
    assert (place.found(shared=True).step, place.found(shared=True).run_folder) == (
        20,
        place.folder / "logs" / "exp_003",
    )
    (place.folder / "shared/step_20/state.json").unlink()
    assert place.found(shared=True).step == 10
    assert len(place.warnings) == 1
    assert place.find(NEVER, shared=True) is None
    assert place.warnings[-1] == (
        f"checkpointing.resume is never: {place.folder}/shared holds checkpoints of an earlier run (steps 10), which"
        " will be removed as soon as this run has saved its first one"
    )


def test_a_run_folder_that_is_gone_or_is_none_gets_a_new_one(place: Place) -> None:
    saved(place.run(3, shared=True), 10)
    (place.folder / "logs/exp_003/config.yaml").unlink()
    assert place.found(shared=True).run_folder is None
    assert "metrics go on in a new folder" in place.warnings[0]


@pytest.mark.parametrize("shared", [True, False])
def test_a_later_attempt_goes_on_from_its_own_checkpoint(place: Place, shared: bool) -> None:
    saved(place.run(1, shared=shared), 30)
    for overrides in ([], [NEVER]):
        # Before it has saved anything, as the first attempt did.
        point = place.find(*overrides, run_id="b", attempt=2, shared=shared)
        assert (point.step if point else None) == (None if overrides else 30)
    # It saves, and is stopped before it has removed the older ones.
    elsewhere = saved(place.run(2, run_id="b", first_run_id="b"), 10)
    if shared:
        elsewhere.newest().folder.rename(place.folder / "shared" / "step_10")
    for overrides in ([], [NEVER]):
        assert place.found(*overrides, run_id="b", attempt=2, shared=shared).step == 10
    # And a new run goes on from what was written last, not from the higher step of a history that was given up.
    assert place.found(run_id="c", shared=shared).step == 10


def test_another_algorithm_is_refused(place: Place) -> None:
    saved(place.run(1), 10)
    with pytest.raises(CheckpointError) as caught:
        place.find(name="grpo_tiny_moe.yaml")
    assert caught.value.problems == [
        f"{place.folder}/logs/exp_001/checkpoints/step_10: a checkpoint of sft, and this run is grpo; set"
        " checkpointing.resume=never to start anew, or another checkpointing.checkpoint_dir"
    ]


def test_changes_are_told_in_one_line_and_the_layout_in_another(place: Place) -> None:
    saved(place.run(1), 10)
    place.found(
        "sft.max_num_steps=400",
        "policy.max_grad_norm=null",
        "logger.wandb_enabled=false",
        "cluster.worker_start_timeout_s=5",
        "checkpointing.save_period=7",
        "+policy.megatron_cfg.moe_z_loss_coeff=0.001",
        "cluster.cpu_workers_per_node=4",
        "policy.megatron_cfg.expert_model_parallel_size=2",
        "policy.train_micro_batch_size=32",
    )
    assert place.warnings == [
        "the configuration differs from the checkpoint's: policy.max_grad_norm 1.0 -> null;"
        " policy.megatron_cfg.moe_z_loss_coeff not set -> 0.001; policy.train_micro_batch_size 64 -> 32;"
        " sft.max_num_steps 200 -> 400",
        "continues in another layout, equal within rounding and not to the last bit: data_parallel_size 2 -> 4;"
        " expert_model_parallel_size 1 -> 2; workers 2 -> 4",
    ]


def test_what_makes_going_on_wrong_is_refused_with_the_way_out(place: Place) -> None:
    saved(place.run(1), 10)
    with pytest.raises(CheckpointError) as caught:
        place.find("policy.train_global_batch_size=256", "policy.precision=bfloat16")
    checkpoint, out = f"{place.folder}/logs/exp_001/checkpoints/step_10", "set checkpointing.resume=never to start anew"
    precision, batch = caught.value.problems
    assert precision.startswith(f"policy.precision: got bfloat16, but {checkpoint} was saved with float32: ")
    assert batch.startswith(f"policy.train_global_batch_size: got 256, but {checkpoint} was saved with 128: ")
    assert all(out in problem for problem in caught.value.problems)


def test_without_the_optimizer_it_starts_anew(place: Place) -> None:
    saved(place.run(1, "checkpointing.save_optimizer=false"), 10)
    assert place.found("policy.megatron_cfg.freeze_moe_router=true").state.with_optimizer is False
    assert "the optimizer starts anew" in place.warnings[-1]


def test_leftovers_are_swept_before_the_search(place: Place) -> None:
    run = place.run(1, shared=True)
    with run.store.locked():
        saved(run, 10)
    run.store.path_of(10).rename(run.store.folder / ".step_10.replaced")
    (run.store.folder / ".step_20.incomplete").mkdir()
    assert place.found(shared=True).step == 10
    assert not (run.store.folder / ".step_20.incomplete").exists()


def test_another_run_that_has_saved_nothing_yet_is_met_before_anything_starts(place: Place) -> None:
    run = place.run(1, shared=True)
    with run.store.locked(), pytest.raises(CheckpointError, match="another run is writing to"):
        place.find(shared=True)
    assert place.find(shared=True) is None
