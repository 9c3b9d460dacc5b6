# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The precision-aware optimizer, with a stand-in for Transformer Engine's Adam: numbers, checkpoints, memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.models.megatron.checkpoint.contents import TrainerCounters, sharded_contents
from nemo_rl_moe.models.megatron.checkpoint.inner_optimizers import inner_optimizers, optimizer_parts
from nemo_rl_moe.models.megatron.training import optimizer as optimizer_module
from nemo_rl_moe.models.megatron.training.optimizer import step_in_chunks
from tests.support.checkpoint_run import Steps, load_and_train, train_and_save
from tests.support.gloo_ranks import run_ranks
from tests.support.gpu_stand_ins import FusedAdam, fused_adam
from tests.support.tiny_model import parallel_job, tiny_policy
from tests.support.training_run import RunSettings, build_trainer, shard_of_step

COMMON = {
    "precision": "bfloat16",
    "distributed_data_parallel_config__use_distributed_optimizer": True,
    "distributed_data_parallel_config__grad_reduce_in_fp32": True,
}


def settings(**changes: Any) -> RunSettings:
    return RunSettings(tiny_policy(2, **COMMON, **{f"optimizer__{name}": value for name, value in changes.items()}))


def precision_aware(job: RunSettings, **changes: Any) -> RunSettings:
    """Return the settings with the precision-aware optimizer, past the rules, which want a GPU for it."""
    megatron = job.policy.megatron_cfg
    chosen = megatron.optimizer.model_copy(update={"use_precision_aware_optimizer": True, **changes})
    update = {"megatron_cfg": megatron.model_copy(update={"optimizer": chosen})}
    return RunSettings(job.policy.model_copy(update=update))


PLAIN = settings()
BFLOAT16 = precision_aware(PLAIN, exp_avg_dtype="bfloat16", exp_avg_sq_dtype="bfloat16")


def train_and_save_fused(job: RunSettings, folder: str) -> tuple[Steps, int]:
    """Three steps and a checkpoint behind the first, in chunks; and the most elements copied at a time."""
    optimizer_module.CHUNK_PARAMETERS = 2000
    with fused_adam() as adam:
        return train_and_save(job, folder, 1, 3), adam.most_copied


def load_into_a_fresh_one(job: RunSettings, folder: str) -> tuple[Steps, set[str], set[str]]:
    """Two steps from the checkpoint, by an optimizer that has taken none; formats of its moments and masters."""
    with parallel_job(job.policy), fused_adam():
        trainer = build_trainer(job.policy, job.model)
        trainer.load_checkpoint(Path(folder), with_optimizer=True)
        steps = []
        for step in (1, 2):
            result = trainer.train([shard_of_step(trainer, job, step)], sft_loss)
            found = {"loss": result.global_loss, "grad_norm": result.grad_norm, "lr": result.lr}
            steps.append(found | result.moe_metrics)
        states = [
            state
            for part in optimizer_parts(trainer.optimizer)
            for inner in inner_optimizers(part)
            for state in inner.state.values()
        ]
        moments = {str(state[kind].dtype) for state in states for kind in ("exp_avg", "exp_avg_sq")}
        return steps, moments, {str(state["master_param"].dtype) for state in states}


def weights_alone(job: RunSettings, folder: str) -> bool:
    """Return whether masters are the weights after weights alone were loaded behind a step."""
    with parallel_job(job.policy), fused_adam():
        trainer = build_trainer(job.policy, job.model)
        trainer.train([shard_of_step(trainer, job, 0)], sft_loss)
        trainer.load_checkpoint(Path(folder), with_optimizer=False)
        return all(
            torch.equal(state["master_param"], parameter.detach().float())
            for part in optimizer_parts(trainer.optimizer)
            for parameter, state in part.optimizer.state.items()
        )


def _sharded(contents: Any) -> Iterator[Any]:
    """Yield the sharded tensors in nested dictionaries and lists."""
    if isinstance(contents, dict | list):
        for each in contents.values() if isinstance(contents, dict) else contents:
            yield from _sharded(each)
    elif hasattr(contents, "key"):
        yield contents


def saves_state_in_place(job: RunSettings) -> bool:
    """Return whether a checkpoint has the optimizer's own tensors, and no copies of them."""
    with parallel_job(job.policy), fused_adam():
        trainer = build_trainer(job.policy, job.model)
        trainer.train([shard_of_step(trainer, job, 0)], sft_loss)
        contents = sharded_contents(trainer._training_objects, TrainerCounters(1, 1, 1))
        of_optimizer = [each.data for each in _sharded(contents) if each.key.startswith("optimizer.state.")]
        own = {tensor.untyped_storage().data_ptr() for tensor in trainer.host_state._tensors()}
        assert len(of_optimizer) > 20
        return all(tensor.untyped_storage().data_ptr() in own for tensor in of_optimizer)


def test_a_checkpoint_copies_no_moments() -> None:
    """In float32 they take as much memory as masters and moments: 30 GB of an 80 GB card."""
    assert run_ranks(saves_state_in_place, 2, BFLOAT16) == [True, True]


@pytest.mark.full
def test_moments_in_float32_give_the_numbers_of_torch(tmp_path: Path) -> None:
    for name in ("plain", "fused"):
        (tmp_path / name).mkdir()
    expected = run_ranks(train_and_save, 2, PLAIN, str(tmp_path / "plain"), 1, 3)[0]
    found, copied = run_ranks(train_and_save_fused, 2, precision_aware(PLAIN), str(tmp_path / "fused"))[0]
    assert found == expected
    assert copied == 0
    # Either reads the other's checkpoint.
    assert run_ranks(load_and_train, 2, PLAIN, str(tmp_path / "fused"), 1, 3)[0] == expected[1:]
    crossed, _, _ = run_ranks(load_into_a_fresh_one, 2, precision_aware(PLAIN), str(tmp_path / "plain"))[0]
    assert crossed == expected[1:]


def test_moments_in_bfloat16_resume_to_the_bit(tmp_path: Path) -> None:
    (steps, copied), _ = run_ranks(train_and_save_fused, 2, BFLOAT16, str(tmp_path))
    assert copied == 2 * 8192  # two moments of the largest tensor, which is a chunk by itself
    resumed, moments, masters = run_ranks(load_into_a_fresh_one, 2, BFLOAT16, str(tmp_path))[0]
    assert resumed == steps[1:]
    assert (moments, masters) == ({"torch.bfloat16"}, {"torch.float32"})
    assert run_ranks(weights_alone, 2, BFLOAT16, str(tmp_path)) == [True, True]


@pytest.mark.parametrize("most", [1, 7, 8, 100])
def test_chunks_update_as_groups_do(most: int) -> None:
    def updated(most_parameters: int | None) -> tuple[list[Any], int]:
        FusedAdam.most_copied = 0
        torch.manual_seed(0)
        tensors = [torch.randn(size) for size in (3, 4, 5, 2)]
        adam = FusedAdam(
            [{"params": tensors[:3]}, {"params": []}, {"params": tensors[3:], "lr": 0.1}],
            master_weights=True,
            use_decoupled_grad=True,
            exp_avg_dtype=torch.bfloat16,
            exp_avg_sq_dtype=torch.bfloat16,
        )
        if most_parameters is not None:
            step_in_chunks(adam, most_parameters)
        for _ in range(3):
            for tensor in tensors:
                tensor.decoupled_grad = torch.randn(len(tensor))  # type: ignore[attr-defined]
            adam.step()
        assert [group.get("step") for group in adam.param_groups] == [3, None, 3]
        return [tensor.tolist() for tensor in tensors], FusedAdam.most_copied

    whole, copied = updated(None)
    assert copied == 2 * 12
    assert updated(most) == (whole, 2 * {1: 5, 7: 7, 8: 7, 100: 12}[most])
