# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint in Megatron-Core's `torch_dist` format, without holding up training.

The format, the plan of who writes what and the final index are Megatron-Core's and torch's. The writing itself is a
thread here: Megatron-Core's own asynchronous writers fork a process that holds this one's sockets, start a server
process for each save, and leave the other ranks waiting when the disk is full on one.
"""

import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from nemo_rl_moe.models.megatron import cpu_backend  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)

_FORMAT = ("torch_dist", 1)


class _SnapshotWriter(FileSystemWriterAsync):
    """Copies what this rank writes when it is planned, and writes the copies when it is told to."""

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Takes the snapshot: copies on the host."""
        assert all(item.type != WriteItemType.BYTE_IO for item in plan.items)  # tensors alone, never pickled objects
        self._file_name = f"{plan.storage_data.prefix}0.distcp"
        # From a GPU this is the copy; on the host the tensor is the live one.
        tensors: list[Any] = [planner.resolve_data(item) for item in plan.items]
        copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        self._snapshot = list(zip(plan.items, copies, strict=True))

    def write(self) -> list[WriteResult]:
        """Writes this rank's file, and lets go of the copies."""
        snapshot, self._snapshot = self._snapshot, []
        if not snapshot:
            return []
        with (Path(self.checkpoint_dir) / self._file_name).open("wb") as stream:
            return [
                _write_item(self.transforms, stream, tensor, item, self._file_name, SerializationFormat.TORCH_SAVE)
                for item, tensor in snapshot
            ]


class CheckpointWrite:
    """One rank's part of a checkpoint that is being written.

    Args:
        writer: Holds the snapshot.
        plan: Of all ranks, on the first one; None on others.
    """

    def __init__(self, writer: _SnapshotWriter, plan: Any):
        self._writer, self._plan = writer, plan
        self._results: list[WriteResult] = []
        self._problem: str | None = None
        # A daemon: what dies with the process was never part of a whole checkpoint.
        self._thread = threading.Thread(target=self._write, name="checkpoint-writer", daemon=True)
        self._thread.start()

    @property
    def is_written(self) -> bool:
        """Whether this rank's part is over, well or not."""
        return not self._thread.is_alive()

    def finish(self) -> str | None:
        """Writes the index of all parts, on the first rank. Every rank calls it, when all are written or to wait.

        Returns:
            What went wrong on any of the ranks, the same on all; None when the checkpoint is whole.
        """
        self._thread.join()
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (self._problem, self._results))
        problems = [f"rank {rank}: {problem}" for rank, (problem, _) in enumerate(parts) if problem is not None]
        outcome = ["; ".join(problems) or None]
        if dist.get_rank() == 0 and not problems:
            try:
                self._writer.finish(self._plan, [results for _, results in parts])
                save_config(CheckpointingConfig(*_FORMAT), str(self._writer.checkpoint_dir))
            except OSError as error:
                outcome = [f"rank 0: {error}"]
        dist.broadcast_object_list(outcome)  # the others wait for it whatever happened
        return outcome[0]

    def _write(self) -> None:
        try:
            if dist.get_rank() == 0:
                # What Megatron-Core keeps beside tensors; here nothing. Both releases can read it.
                torch.save({}, Path(self._writer.checkpoint_dir) / "common.pt")
            self._results = self._writer.write()
        except Exception as error:  # torch wraps errors of the disk in its own
            self._problem = " ".join(str(error).split()) or type(error).__name__


def start_write(contents: dict[str, Any], directory: Path) -> CheckpointWrite:
    """Takes the snapshot and begins to write it. Every rank calls it; training may go on when it returns.

    Args:
        contents: What `sharded_contents` returned.
        directory: An existing, empty folder that every rank can reach.
    """
    sharded, _ = save_preprocess(contents)
    # What data-parallel ranks hold in common is written by all of them in parts, and not by the first alone.
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(*_FORMAT), group).apply_saving_parallelization(
        sharded
    )
    sharded, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
    writer = _SnapshotWriter(directory)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    (_, plan, _), *_ = save_state_dict_async_plan(
        mcore_to_pyt_state_dict(sharded, False), writer, None, 0, planner=planner
    )
    return CheckpointWrite(writer, plan)
