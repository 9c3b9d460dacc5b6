# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Snapshots of checkpoints: whole while training goes on, and on a GPU in the order of its streams."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.models.megatron.checkpoint import save, snapshot
from nemo_rl_moe.models.megatron.checkpoint.snapshot import Snapshots
from nemo_rl_moe.models.megatron.model.host_memory import host_tensors
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import parallel_job, tiny_policy
from tests.support.training_run import RunSettings, build_trainer, shard_of_step, tiny_trainer

LIMIT_S = 200.0


def job() -> RunSettings:
    return RunSettings(
        tiny_policy(1, precision="bfloat16", distributed_data_parallel_config__use_distributed_optimizer=True)
    )


def train(trainer: Any, settings: RunSettings, step: int) -> float:
    return float(trainer.train([shard_of_step(trainer, settings, step)], sft_loss).global_loss)


def save_while_training(settings: RunSettings, folder: str, is_away: bool) -> tuple[list[float], int, bool]:
    """Start a checkpoint after a step, and write it when two more are done.

    Returns:
        The losses; bytes that were copied for the snapshot; whether the state could leave before it was written.
    """
    may_write, copied, write_item = threading.Event(), list[int](), save._write_item
    plain_to = torch.Tensor.to

    def late(*arguments: Any) -> Any:
        assert may_write.wait(LIMIT_S)
        return write_item(*arguments)

    def counted(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        if options.get("copy"):
            copied.append(tensor.nbytes)
        return plain_to(tensor, *arguments, **options)

    with parallel_job(settings.policy), mock.patch.object(save, "_write_item", late):
        trainer = build_trainer(settings.policy, settings.model)
        losses = [train(trainer, settings, 0)]
        if is_away:
            trainer.host_state.leave()
        with mock.patch.object(torch.Tensor, "to", counted):
            trainer.start_checkpoint(Path(folder), with_optimizer=True)
        num_copied = sum(copied)
        losses += [train(trainer, settings, 1)]
        assert not trainer.checkpoint_is_written(), trainer.finish_checkpoint()
        leaving = threading.Thread(target=trainer.host_state.leave)
        leaving.start()
        leaving.join(1.0 if is_away else LIMIT_S)
        left_early = not leaving.is_alive()
        may_write.set()
        leaving.join()
        assert trainer.finish_checkpoint() is None
        losses += [train(trainer, settings, 2)]
        return losses, num_copied, left_early


def resume(settings: RunSettings, folder: str) -> list[float]:
    with tiny_trainer(settings.policy, settings.model) as trainer:
        trainer.load_checkpoint(Path(folder), with_optimizer=True)
        return [train(trainer, settings, step) for step in (1, 2)]


@pytest.mark.parametrize("is_away", [True, pytest.param(False, marks=pytest.mark.full)])
def test_what_is_written_late_is_what_was_there(is_away: bool, tmp_path: Path) -> None:
    """State that is away is not copied: it stays as it is until it leaves again, which waits."""
    ((losses, num_copied, left_early),) = run_ranks(save_while_training, 1, job(), str(tmp_path), is_away)
    assert run_ranks(resume, 1, job(), str(tmp_path)) == [losses[1:]]
    assert left_early is not is_away
    # Of 2 bytes for a weight and 12 for its master and moments the weights alone, or all.
    (tmp_path / "again").mkdir()
    ((_, all_bytes, _),) = run_ranks(save_while_training, 1, job(), str(tmp_path / "again"), False)
    assert num_copied < all_bytes / 5 if is_away else num_copied == all_bytes


class FakeStream:
    """A stream that notes what is asked of it."""

    def __init__(self, name: str, diary: list[str]):
        self.name, self.diary = name, diary

    def wait_stream(self, other: "FakeStream") -> None:
        self.diary.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Any) -> None:
        self.diary.append(f"{self.name} waits for the copies")

    def record_event(self) -> Any:
        self.diary.append(f"{self.name} marks the copies")
        return SimpleNamespace(synchronize=lambda: self.diary.append("the writer waits for the copies"))


@contextmanager
def entered(stream: FakeStream) -> Iterator[None]:
    stream.diary.append(f"into {stream.name}")
    yield


def test_on_a_gpu_the_host_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    diary: list[str] = []
    main = FakeStream("main", diary)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: FakeStream("side", diary))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    pinned: list[bool] = []

    def on_host(tensors: Any, **options: bool) -> list[torch.Tensor]:
        pinned.append(options["pinned"])
        return host_tensors(tensors, pinned=False)

    monkeypatch.setattr(snapshot, "host_tensors", on_host)
    frozen = torch.ones(3)
    snapshots = Snapshots(torch.device("cuda"), lambda tensor: tensor is frozen)
    snapshots.before_changes()
    snapshots.wait()
    assert diary == [], "there is none yet"
    first = snapshots.take([torch.arange(4.0), frozen, torch.arange(2)])
    assert [tensor.tolist() for tensor in first] == [[0.0, 1.0, 2.0, 3.0], [1.0] * 3, [0, 1]]
    assert first[1].data_ptr() == frozen.data_ptr()
    assert snapshots.has_frozen
    snapshots.wait()
    snapshots.before_changes()
    assert diary == [
        "side waits for main",
        "into side",
        "side marks the copies",
        "the writer waits for the copies",
        "main waits for the copies",
    ]
    second = snapshots.take([torch.zeros(4), frozen, torch.zeros(2, dtype=torch.long)])
    assert [tensor.data_ptr() for tensor in second] == [tensor.data_ptr() for tensor in first]
    assert pinned == [True], "pinned memory is asked for once"
