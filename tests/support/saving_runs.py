# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs that do nothing but save, of a policy that really writes its checkpoints, and a place where they have been.

As a program, `saving_runs FOLDER` saves one checkpoint after the other until it is killed. Each line that is read
starts a run. It says its process id, then each checkpoint that it has published; after its end comes `ended`.
"""

import hashlib
import json
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nemo_rl_moe.checkpoints.best_metric import choice_in_force
from nemo_rl_moe.checkpoints.checkpointer import Checkpointer
from nemo_rl_moe.checkpoints.resume import ResumePoint, find_resume_point
from nemo_rl_moe.checkpoints.state import LoopState, RunDescription, layout_of
from nemo_rl_moe.checkpoints.store import Checkpoint, CheckpointStore
from nemo_rl_moe.config.algorithm import metric_in_force
from nemo_rl_moe.config.loading import dump_resolved, load_any_config, load_config
from nemo_rl_moe.config.schema import MasterConfig, SFTMasterConfig

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
        assert not list(directory.iterdir())
        assert self._thread is None, "the last checkpoint has not been asked after"
        self.with_optimizer.append(with_optimizer)
        self._thread = threading.Thread(target=self._write, args=(directory,), daemon=True)
        self._thread.start()

    def poll_checkpoint(self, *, wait: bool) -> list[str] | None:
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


class Run:
    """A run that does nothing but save.

    Args:
        folder: Its checkpoints are in `folder/checkpoints`, unless the configuration names another folder.
        overrides: Of the tiny exemplar.
        may_write: The policy waits for it before it writes.
        shard_bytes: What the policy writes.
        beside: Models that are saved beside the policy, by role.
        changes: To the description of the run.
    """

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        may_write: threading.Event | None = None,
        shard_bytes: int = 10_000,
        beside: Mapping[str, ThreadedWriter] = MappingProxyType({}),
        **changes: Any,
    ):
        self.config = config_of("checkpointing.checkpoint_dir=null", *overrides)
        self.warnings: list[str] = []
        self.messages: list[str] = []
        self.records_are_on_disk = True
        self.policy = ThreadedWriter(shard_bytes, may_write)
        settings = choice_in_force(self.config.checkpointing, metric_in_force(self.config), validates=True)
        self.store = CheckpointStore(Path(settings.checkpoint_dir or folder / "checkpoints"), self.warnings.append)
        self.describe = lambda: description(self.config, folder, **changes)
        self.checkpointer = Checkpointer(
            self.store,
            {"policy": self.policy, **beside},
            settings,
            self.describe,
            self.warnings.append,
            self.messages.append,
            lambda: self.records_are_on_disk,
        )

    def save(self, step: int, metrics: Mapping[str, float] = MappingProxyType({}), **state: Any) -> None:
        """Save, and waits for the end of it."""
        self.checkpointer.start(replace(LoopState(step=step, batches_taken=step), **state), metrics)
        self.checkpointer.poll(wait=True)

    def steps(self) -> list[int]:
        return [checkpoint.step for checkpoint in self.store.checkpoints()]

    def newest(self) -> Checkpoint:
        return self.store.checkpoints()[-1]


def config_of(*overrides: str) -> SFTMasterConfig:
    return load_config("sft_tiny_moe.yaml", list(overrides), check_paths=False)


SHARED = "checkpointing.checkpoint_dir={}/shared"
NEVER = "checkpointing.resume=never"


class Place:
    """A log folder, and a folder of checkpoints that runs share."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.warnings: list[str] = []

    def overrides(self, *overrides: str, shared: bool) -> list[str]:
        """Return where this place is, and further overrides."""
        directory = SHARED.format(self.folder) if shared else "checkpointing.checkpoint_dir=null"
        return [f"logger.log_dir={self.folder / 'logs'}", directory, *overrides]

    def run_folder(self, number: int) -> Path:
        return self.folder / "logs" / f"exp_{number:03d}"

    def run(self, number: int, *overrides: str, shared: bool = False, **changes: Any) -> Run:
        run_folder = self.run_folder(number)
        run_folder.mkdir(parents=True, exist_ok=True)
        (run_folder / "config.yaml").write_text("")
        (run_folder / "run.json").write_text(json.dumps({"run_id": changes.get("first_run_id", "run-a")}))
        return Run(run_folder, *self.overrides("checkpointing.keep_top_k=null", *overrides, shared=shared), **changes)

    def find(
        self,
        *overrides: str,
        run_id: str = "new",
        restart: int = 0,
        shared: bool = False,
        name: str = "sft_tiny_moe.yaml",
    ) -> ResumePoint | None:
        self.warnings.clear()
        config = load_any_config(name, self.overrides(*overrides, shared=shared), check_paths=False)
        return find_resume_point(config, run_id, restart, self.warnings.append)

    def found(self, *overrides: str, **arguments: Any) -> ResumePoint:
        point = self.find(*overrides, **arguments)
        assert point is not None
        return point


def saved(run: Run, *steps: int) -> Run:
    for step in steps:
        run.save(step)
    return run


def save_in_a_loop(folder: Path) -> None:
    """Go on from the newest checkpoint, and never ends."""
    run = Run(folder, "checkpointing.keep_top_k=2")
    with run.store.locked():
        run.store.sweep()
        newest = next(reversed(run.store.checkpoints()), None)
        step = newest.step if newest else 0
        reported = newest.folder if newest else None
        while True:
            step += 1
            run.checkpointer.start(LoopState(step=step), {"val/accuracy": (step * 7 % 5) / 5})
            run.checkpointer.poll(wait=step % 3 == 0)
            published = run.checkpointer.last_published
            if published is not None and published != reported:
                reported = published
                print(published.name, flush=True)


if __name__ == "__main__":
    for _ in sys.stdin:
        child = os.fork()  # quicker than another interpreter
        if child == 0:
            print(os.getpid(), flush=True)
            save_in_a_loop(Path(sys.argv[1]))
        os.waitpid(child, 0)
        print("ended", flush=True)
