# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Where a run starts: the newest checkpoint, its own one after a failure, or the beginning; and what is reported."""

import shutil

import pytest

from nemo_rl_moe.checkpoints.changes import changed_keys, other_experiment
from nemo_rl_moe.config.algorithm import ALGORITHMS
from nemo_rl_moe.errors import CheckpointError
from tests.support.saving_runs import NEVER, Place, saved


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
    assert (point.step, point.state_folder("policy")) == (20, newest.store.path_of(20) / "policy")
    assert point.run_folder == place.folder / "logs" / "exp_1000"
    assert place.warnings == []
    assert point.summary(50) == f"going on from {point.folder}: 20 of 50 steps are done"
    assert "20 of 20 steps are done. For more steps set a higher sft.max_num_steps" in point.summary(20)
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


def test_a_run_folder_that_is_gone_is_replaced_by_a_new_one(place: Place) -> None:
    saved(place.run(3, shared=True), 10)
    shutil.rmtree(place.folder / "logs/exp_003")
    assert place.found(shared=True).run_folder is None
    assert "this run writes its metrics to a new folder" in place.warnings[0]


@pytest.mark.parametrize("shared", [True, False])
def test_a_restart_goes_on_from_its_own_checkpoint(place: Place, shared: bool) -> None:
    saved(place.run(1, shared=shared), 30)
    for overrides in ([NEVER], []):
        # Before it has saved anything, like the first launch.
        point = place.find(*overrides, run_id="b", restart=1, shared=shared)
        assert (point.step if point else None) == (None if overrides else 30)
    # It saves, and is stopped before it has removed the older ones.
    elsewhere = saved(place.run(2, run_id="b", first_run_id="b"), 10)
    if shared:
        elsewhere.newest().folder.rename(place.folder / "shared" / "step_10")
    for overrides in ([], [NEVER]):
        assert place.found(*overrides, run_id="b", restart=1, shared=shared).step == 10
    # And a new run goes on from what was written last, not from the higher step of a history that was given up.
    assert place.found(run_id="c", shared=shared).step == 10


def test_another_algorithm_is_refused(place: Place) -> None:
    saved(place.run(1, shared=True), 10)
    with pytest.raises(CheckpointError) as caught:
        place.find(name="grpo_tiny_moe.yaml", shared=True)
    assert caught.value.problems == [
        f"{place.folder}/shared/step_10: a checkpoint of sft, and this run is grpo; set"
        " checkpointing.resume=never to start anew, or another checkpointing.checkpoint_dir"
    ]


def test_changes_are_reported_in_one_line_and_the_layout_in_another(place: Place) -> None:
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
        "the parallel layout has changed, so results may differ by rounding: data_parallel_size 2 -> 4;"
        " expert_model_parallel_size 1 -> 2; workers 2 -> 4",
    ]


def test_a_value_under_its_former_name_is_no_change() -> None:
    recorded = {"dpo": {"reference_logprobs": "beforehand", "seed": 1}}
    assert changed_keys(recorded, {"dpo": {"reference_logprobs": "precompute", "seed": 1}}) == {}
    changes = changed_keys(recorded, {"dpo": {"reference_logprobs": "in_step", "seed": 1}})
    assert changes == {"dpo.reference_logprobs": ("precompute", "in_step")}


def test_a_key_under_its_former_name_is_no_change() -> None:
    recorded = {"policy": {"megatron_cfg": {"routing_tape": True}}}  # older name
    assert changed_keys(recorded, {"policy": {"megatron_cfg": {"capture_routing": True}}}) == {}
    changes = changed_keys(recorded, {"policy": {"megatron_cfg": {"capture_routing": False}}})
    assert changes == {"policy.megatron_cfg.capture_routing": ("true", "false")}


def test_a_key_that_is_gone_since_is_a_change_where_it_had_a_value() -> None:
    assert changed_keys({"policy": {"gone": None, "other": 1}}, {"policy": {}}) == {"policy.other": ("1", "not set")}


def test_what_makes_going_on_wrong_is_refused_with_the_way_out(place: Place) -> None:
    saved(place.run(1, shared=True), 10)
    with pytest.raises(CheckpointError) as caught:
        place.find(
            "policy.train_global_batch_size=256",
            "policy.precision=bfloat16",
            "policy.model_name=elsewhere",
            "sft.seed=7",
            "data.shuffle=false",
            shared=True,
        )
    checkpoint, out = f"{place.folder}/shared/step_10", "set checkpointing.resume=never to start anew"
    shuffle, precision, batch, seed = caught.value.problems
    assert precision.startswith(f"policy.precision: got bfloat16, but {checkpoint} was saved with float32: ")
    assert batch.startswith(f"policy.train_global_batch_size: got 256, but {checkpoint} was saved with 128: ")
    assert shuffle.startswith(
        f"data.shuffle: got false, but {checkpoint} was saved with true: the checkpoint's position"
    )
    assert seed.startswith(f"sft.seed: got 7, but {checkpoint} was saved with ")
    assert all(out in problem for problem in caught.value.problems)


def test_another_model_is_reported_where_the_folder_was_named(place: Place) -> None:
    saved(place.run(1, shared=True), 10)
    assert place.found("policy.model_name=elsewhere", shared=True).step == 10
    assert "policy.model_name examples/assets/tiny_qwen3_moe -> elsewhere" in place.warnings[0]


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("policy.model_name=elsewhere", "policy.model_name was examples/assets/tiny_qwen3_moe there and is elsewhere"),
        ("policy.tokenizer.name=elsewhere", "policy.tokenizer.name was "),
        ("data.train.path=other.jsonl", "data.train.path was data/addition/train.jsonl there and is other.jsonl here"),
        ("data.train.split=test", "data.train.split was train there and is test here"),
        ("sft.seed=7", "sft.seed was "),
        ("data.shuffle=false", "data.shuffle was true there and is false here"),
        (None, "algorithm was sft there and is grpo here"),
    ],
)
def test_another_experiment_starts_anew_where_no_folder_was_named(
    place: Place, override: str | None, difference: str
) -> None:
    saved(place.run(1), 10)
    if override is None:
        assert place.find(name="grpo_tiny_moe.yaml") is None
    else:
        with place.run(1).store.locked():  # while the other one runs, too
            assert place.find(override) is None
    (line,) = place.warnings
    folder = place.run_folder(1)
    assert line.startswith(f"{folder} is not resumed, and this run starts anew: {difference}")
    assert line.endswith(f"set checkpointing.checkpoint_dir={folder}/checkpoints")
    assert place.found("policy.megatron_cfg.optimizer.lr=0.5").step == 10, "the same experiment with another rate"


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


@pytest.mark.parametrize("shared", [True, False])
def test_damage_alone_is_no_reason_to_start_anew(place: Place, shared: bool) -> None:
    run = saved(place.run(1, shared=shared), 5, 8)
    for step in (5, 8):
        (run.store.path_of(step) / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"none of the checkpoints there can be used; set checkpointing\.resume"):
        place.find(shared=shared)
    assert len(place.warnings) == 2
    assert place.find(NEVER, shared=shared) is None


def test_a_key_that_an_older_release_did_not_have_makes_no_other_experiment() -> None:
    old = {"policy": {"tokenizer": {"name": "m", "chat_template": None}}}
    new = {"policy": {"tokenizer": {"name": "m", "chat_template": None, "corrected_template": "auto"}}}
    changes = changed_keys(old, new)
    assert changes == {"policy.tokenizer.corrected_template": ("not set", "auto")}
    assert other_experiment(ALGORITHMS["sft"], changes) is None
    changes = changed_keys(
        new, {"policy": {"tokenizer": {**new["policy"]["tokenizer"], "corrected_template": "never"}}}
    )
    assert other_experiment(ALGORITHMS["sft"], changes) == ("policy.tokenizer.corrected_template", "auto", "never")
