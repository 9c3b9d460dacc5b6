# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory of one GPU at each moment of a run, by arithmetic: of the trainer, an engine beside it, and both processes.

The order is a run's: workers start and load a checkpoint; the trainer's movable state goes to the host; engines start
with their whole share free, and sleep; weights arrive; responses are generated; engines sleep while the trainer works.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl_moe.models.megatron.model.engine_memory import EngineMemory
from nemo_rl_moe.models.megatron.model.memory_estimate import WorkerMemory

PROCESS_BYTES = 1_500_000_000
"""Estimate for a process with a GPU: CUDA's context (0.5 GB) and the buffers of NCCL's groups."""
KEPT_BYTES = 1_500_000_000
"""Estimate for what an engine keeps while it sleeps, besides its process: graphs, workspaces, small buffers."""


@dataclass(frozen=True)
class Moment:
    name: str
    trainer: int
    engine: int
    processes: int

    @property
    def total(self) -> int:
        return self.trainer + self.engine + self.processes


@dataclass(frozen=True)
class EngineShare:
    """An engine's rank on a GPU of the trainer."""

    memory: EngineMemory
    share: int


def moments(worker: WorkerMemory, engine: EngineShare | None) -> list[Moment]:
    if engine is None:
        found = [Moment("while training", worker.while_training_at_least, 0, PROCESS_BYTES)]
        if worker.key_value_cache:
            generating = worker.while_generating + worker.key_value_cache
            found.append(Moment("while responses are generated", generating, 0, PROCESS_BYTES))
        return found
    both = 2 * PROCESS_BYTES
    return [
        Moment("when a checkpoint is loaded", worker.always, 0, PROCESS_BYTES),
        Moment("when engines start", worker.while_generating, engine.share, both),
        Moment("when weights arrive", worker.while_generating, engine.memory.weights + KEPT_BYTES, both),
        Moment("while responses are generated", worker.while_generating, engine.share, both),
        Moment("while training", worker.while_training_at_least, KEPT_BYTES, both),
    ]


def fullest(of_a_run: Sequence[Moment]) -> Moment:
    """Return the moment with the most bytes, of several the first."""
    return max(of_a_run, key=lambda moment: moment.total)


def smallest_device(worker: WorkerMemory, memory: EngineMemory, utilization: float) -> float:
    """Return the bytes of the smallest GPU that holds trainer and engine at each moment; infinite where none does."""
    held = worker.while_generating + 2 * PROCESS_BYTES
    others = max(moment.total for moment in moments(worker, EngineShare(memory, share=0)))
    return max(memory.fits_from(held, utilization), others)
