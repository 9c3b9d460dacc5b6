# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Saving of a checkpoint in Megatron-Core's `torch_dist` format, in a background thread.

The format, the plan of each rank's writes, and the index come from Megatron-Core and torch. Only the writing differs:
Megatron-Core's asynchronous writers fork a process that inherits the sockets, start a server process for each save, and
leave the other ranks waiting if the disk of one rank is full.
"""

import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from nemo_rl_moe.atomic_writes import sync
from nemo_rl_moe.checksums import INVENTORY_FILE_NAME, ChecksumStream, Part, write_inventory
from nemo_rl_moe.models.megatron.checkpoint.index import COMMON_FILE, FORMAT, FORMAT_FILE
from nemo_rl_moe.models.megatron.checkpoint.snapshot import Snapshots


class _SnapshotWriter(FileSystemWriterAsync):
    """Writer of one rank's part of a checkpoint. It takes a snapshot of the planned tensors and writes it later.

    Args:
        snapshots: Memory for the snapshot. With None, each tensor is copied when it is written, so the model must not
            change before.

    Attributes:
        parts: Name of a finished file -> its parts with their checksums.
    """

    def __init__(self, directory: Path, snapshots: Snapshots | None):
        super().__init__(directory)
        self._snapshots = snapshots
        self.is_cancelled = False
        self.parts: dict[str, list[Part]] = {}

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged. torch's method would create a missing folder, which only this rank would see."""
        return plan

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        assert all(item.type != WriteItemType.BYTE_IO for item in plan.items)  # only tensors, no pickled objects
        self._file_name = f"{plan.storage_data.prefix}0.distcp"
        tensors: list[Any] = [planner.resolve_data(item) for item in plan.items]
        if self._snapshots is not None:
            tensors = self._snapshots.take(tensors)
        self._snapshot = list(zip(plan.items, tensors, strict=True))

    def write(self) -> list[WriteResult]:
        snapshot, self._snapshot = self._snapshot, []
        if self._snapshots is not None:
            self._snapshots.wait()
        if not snapshot:
            return []
        results = []
        with (Path(self.checkpoint_dir) / self._file_name).open("wb") as file:
            stream: Any = ChecksumStream(file)
            for item, tensor in snapshot:
                if self.is_cancelled:
                    raise RuntimeError("cancelled")
                # A view would be written with its entire storage.
                is_view = tensor.untyped_storage().nbytes() != tensor.nbytes
                if self._snapshots is None or is_view:
                    tensor = tensor.detach().to("cpu", copy=True)
                results.append(
                    _write_item(self.transforms, stream, tensor, item, self._file_name, SerializationFormat.TORCH_SAVE)
                )
                stream.end_part(item.index.fqn)
            stream.to_disk()
        self.parts = {self._file_name: stream.parts}
        return results


class CheckpointWrite:
    """A running write of one rank's part of a checkpoint.

    Args:
        plan: Write plan of all ranks on rank 0, None on other ranks.
    """

    def __init__(self, writer: _SnapshotWriter, plan: Any):
        self._writer, self._plan = writer, plan
        self._directory = Path(writer.checkpoint_dir)
        self._results: list[WriteResult] = []
        self._problem: str | None = None
        # A daemon thread may end with the process, because an unfinished checkpoint is not used.
        self._thread = threading.Thread(target=self._write, name="checkpoint-writer", daemon=True)
        self._thread.start()

    @property
    def is_written(self) -> bool:
        """Whether the write of this rank's part has ended, with or without success."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the end of this rank's write."""
        self._thread.join()

    def cancel(self) -> None:
        """End the write after the current tensor, because a running thread would disturb the end of the process."""
        self._writer.is_cancelled = True
        self.wait()

    def finish(self) -> str | None:
        """Wait for all ranks, and write the index on rank 0. Every rank calls it.

        Returns:
            The problems of all ranks, as one text that is the same on every rank. None if the checkpoint is complete.
        """
        self.wait()
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (self._problem, self._results, self._writer.parts))
        problems = [f"rank {rank}: {problem}" for rank, (problem, _, _) in enumerate(parts) if problem is not None]
        outcome = ["; ".join(problems) or None]
        if dist.get_rank() == 0 and not problems:
            files = {name: checked for _, _, of_rank in parts for name, checked in of_rank.items()}
            outcome = [self._complete([results for _, results, _ in parts], files)]
        dist.broadcast_object_list(outcome)  # also after a failure, because the other ranks wait
        return outcome[0]

    def _complete(self, results: list[list[WriteResult]], files: dict[str, list[Part]]) -> str | None:
        """Write index and checksums if rank 0 finds the parts of all ranks. Returns the problem, or None."""
        try:
            problem = _torn_part(self._directory, results)
            if problem is None:
                # Megatron-Core adds the plans of all ranks for the next save. A reader does not need them.
                vars(self._plan).pop("all_local_plans", None)
                self._writer.finish(self._plan, results)
                save_config(CheckpointingConfig(*FORMAT), str(self._directory))
                sync(self._directory / FORMAT_FILE)
                write_inventory(self._directory, files)
                sync(self._directory / INVENTORY_FILE_NAME)
        except Exception as error:
            problem = _text(error)
        return None if problem is None else f"rank 0: {problem}"

    def _write(self) -> None:
        try:
            if not self._directory.is_dir():
                raise FileNotFoundError(f"there is no folder {self._directory}; all ranks must share it")
            if dist.get_rank() == 0:
                # Megatron-Core's file for objects, which is empty here. Both supported releases can read it.
                torch.save({}, self._directory / COMMON_FILE)
                sync(self._directory / COMMON_FILE)
            self._results = self._writer.write()
        # After an uncaught error the part would look complete. torch's errors are not all of type Exception.
        except BaseException as error:
            self._problem = _text(error)


def _torn_part(directory: Path, results: list[list[WriteResult]]) -> str | None:
    """Return a message if this rank does not find a part that another rank has written, otherwise None."""
    for rank, parts in enumerate(results):
        written = [part.storage_data for part in parts]
        ends = {info.relative_path: info.offset + info.length for info in written}  # in the order of offsets
        for name, end in ends.items():
            path = directory / name
            size = path.stat().st_size if path.exists() else 0
            if size < end:
                return (
                    f"{path}: {size} of the {end} bytes that rank {rank} has written; all ranks must share the folder"
                )
    return None


def _text(error: BaseException) -> str:
    # If the disk is full, torch's writer fails again when it closes the file. The reason is in the error's context.
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            error = cause
        cause = cause.__cause__ or cause.__context__
    return " ".join(str(error).split()) or type(error).__name__


def start_write(contents: dict[str, Any], directory: Path, snapshots: Snapshots | None) -> CheckpointWrite:
    """Take a snapshot, begin to write it, and return the write in progress. Training may continue meanwhile.

    Every rank calls it.

    Args:
        contents: Result of `sharded_contents`.
        directory: An empty folder that every rank can reach.
        snapshots: Memory for this rank's snapshot. With None, no memory is needed, but the contents must not change
            until they are written.
    """
    sharded, _ = save_preprocess(contents)
    # Data-parallel ranks divide the tensors that they share. Otherwise the first rank would write all of these tensors.
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(*FORMAT), group).apply_saving_parallelization(sharded)
    sharded, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
    writer = _SnapshotWriter(directory, snapshots)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    (_, plan, _), *_ = save_state_dict_async_plan(
        mcore_to_pyt_state_dict(sharded, False), writer, None, 0, planner=planner
    )
    return CheckpointWrite(writer, plan)
