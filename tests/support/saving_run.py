# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A run that does nothing but save."""

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nemo_rl_moe.checkpoints.best_metric import choice_in_force
from nemo_rl_moe.checkpoints.checkpointer import Checkpointer
from nemo_rl_moe.checkpoints.state import LoopState
from nemo_rl_moe.checkpoints.store import Checkpoint, CheckpointStore
from nemo_rl_moe.config.algorithm import metric_in_force
from nemo_rl_moe.config.loading import load_config
from nemo_rl_moe.config.schema import SFTMasterConfig
from tests.support.checkpoint_writer import ThreadedWriter, description


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
        """Return the steps that have a whole checkpoint."""
        return [checkpoint.step for checkpoint in self.store.checkpoints()]

    def newest(self) -> Checkpoint:
        """Return the newest checkpoint, which is there."""
        return self.store.checkpoints()[-1]


def config_of(*overrides: str) -> SFTMasterConfig:
    """Return the tiny exemplar, changed."""
    return load_config("sft_tiny_moe.yaml", list(overrides), check_paths=False)
