# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A policy that really writes its checkpoints, in a thread, without a model; and what a run says of itself."""

import hashlib
import threading
from pathlib import Path
from typing import Any

from nemo_rl_moe.checkpoints.state import RunDescription, layout_of
from nemo_rl_moe.checkpoints.store import Checkpoint
from nemo_rl_moe.config.loading import dump_resolved
from nemo_rl_moe.config.schema import MasterConfig

SHARDS = ("shard_0.bin", "shard_1.bin")


class ThreadedWriter:
    """Writes shards that a reader can distinguish whole from cut: each ends with the hash of what stands before.

    Args:
        shard_bytes: Size of a shard.
        may_write: The writing waits for this event; None: it does not wait.
    """

    def __init__(self, shard_bytes: int = 10_000, may_write: threading.Event | None = None):
        self.shard_bytes = shard_bytes
        self.with_optimizer: list[bool] = []
        self.fails_with: str | None = None
        self._may_write = may_write
        self._thread: threading.Thread | None = None
        self._problem: str | None = None

    def start_checkpoint(self, directory: Path, *, with_optimizer: bool) -> None:
        """Begin to write."""
        assert not list(directory.iterdir())
        assert self._thread is None, "the last checkpoint has not been asked after"
        self.with_optimizer.append(with_optimizer)
        self._thread = threading.Thread(target=self._write, args=(directory,), daemon=True)
        self._thread.start()

    def poll_checkpoint(self, *, wait: bool) -> list[str] | None:
        """Return how it stands."""
        if self._thread is None:
            return None
        if wait:
            self._thread.join()
        if self._thread.is_alive():
            return None
        self._thread = None
        return [] if self._problem is None else [self._problem]

    def _write(self, directory: Path) -> None:
        self._problem = self.fails_with
        if self._may_write is not None:
            self._may_write.wait(60)
        try:
            for name in SHARDS:
                content = f"{directory.parent.name} {name}".encode().ljust(self.shard_bytes, b".")
                (directory / name).write_bytes(content + hashlib.sha256(content).digest())
        except OSError as error:
            self._problem = str(error.strerror)


def is_whole(checkpoint: Checkpoint) -> bool:
    """Return whether all that the writer wrote is there."""
    for name in SHARDS:
        content = (checkpoint.folder / "policy" / name).read_bytes()
        if hashlib.sha256(content[:-32]).digest() != content[-32:]:
            return False
    return True


def description(config: MasterConfig, run_folder: Path, **changes: Any) -> RunDescription:
    """Return what a run of this configuration says of itself."""
    resolved = dump_resolved(config)
    values: dict[str, Any] = {
        "algorithm": next(iter(resolved)),
        "run_id": "run-a",
        "first_run_id": "run-a",
        "run_folder": str(run_folder.absolute()),
        "logger_run_ids": {"wandb": "w1"},
        "config": resolved,
        "layout": layout_of(config),
        "fingerprints": {"model": "m"},
        "versions": {"python": "3", "packages": {"ray": None}},
    }
    return RunDescription(**values | changes)
