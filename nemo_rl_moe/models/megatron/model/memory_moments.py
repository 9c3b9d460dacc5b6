# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory of one GPU in each phase of a run, by arithmetic, for the trainer, an engine on the same GPU, and processes.

The phases of a run: Workers start and load a checkpoint. The trainer's movable state goes to the host. Engines start
while their full share is free, and then sleep. Weights arrive. Responses are generated. Engines sleep while the trainer
works.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nemo_rl_moe.distributed.shared_gpu import Entry, GpuBytes, SharedGpu
from nemo_rl_moe.models.megatron.model.engine_memory import EngineMemory
from nemo_rl_moe.models.megatron.model.memory_estimate import WorkerMemory

PROCESS_BYTES = 1_500_000_000
"""Estimate for a process: CUDA's context (0.5 GB) and the buffers of NCCL's groups."""
KEPT_BYTES = 1_500_000_000
"""Estimate for a sleeping engine, besides its process: graphs, workspaces, small buffers."""


@dataclass(frozen=True)
class EngineShare:
    """Memory of an engine's rank on a GPU that it shares with the trainer.

    Attributes:
        share: Bytes that the engine takes while it is awake.
        refit: Bytes of transfer buckets and of a buffered layer while weights arrive.
    """

    memory: EngineMemory
    share: int
    refit: int = 0


def moments(worker: WorkerMemory, engine: EngineShare | None) -> list[Entry]:
    """Return the peak of GPU memory in each phase of a run, in the order of the phases."""
    gpu = SharedGpu(
        moves_training_state=worker.is_moved,
        sizes=GpuBytes(
            process=PROCESS_BYTES,
            weights=worker.weights,
            training=worker.always - worker.weights,
            in_a_step=worker.while_training_at_least - worker.always,
            buckets=0 if engine is None else engine.refit,
            engine_weights=0 if engine is None else engine.memory.weights,
            engine_share=0 if engine is None else engine.share,
            engine_kept=KEPT_BYTES,
        ),
    )
    if engine is None:
        gpu.train()
        if not worker.key_value_cache:
            return gpu.ledger
        generating = worker.while_generating + worker.key_value_cache
        return [*gpu.ledger, Entry("while responses are generated", generating, 0, PROCESS_BYTES)]
    gpu.load()
    gpu.make_room()
    gpu.start_engine()
    gpu.sleep_engine()
    gpu.receive_weights()
    gpu.wake_cache("while responses are generated")
    # The refit check sends the weights once more. The cache is awake then, as it is when a dead engine is replaced.
    gpu.receive_weights()
    gpu.sleep_engine()
    gpu.train()
    return gpu.ledger


def fullest(of_a_run: Sequence[Entry]) -> Entry:
    """Return the first phase with the most bytes."""
    return max(of_a_run, key=lambda entry: entry.total)


def smallest_device(worker: WorkerMemory, engine: EngineShare, utilization: float) -> float:
    """Return the bytes of the smallest GPU that holds trainer and engine in each phase, or infinity."""
    held = worker.while_generating + 2 * PROCESS_BYTES + engine.refit
    others = max(entry.total for entry in moments(worker, replace(engine, share=0)))
    return max(engine.memory.fits_from(held, utilization), others)
