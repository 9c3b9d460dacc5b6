# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Model of the memory of a GPU that a rank of the trainer and one of an engine use in turn.

The policy and the engine report each event before they act. An event in a wrong state, such as a request to a sleeping
engine or an engine that wakes next to the trainer's full allocator, raises an error with the missing condition, instead
of running out of memory or hanging. `plan` uses the same model with sizes.
"""

from dataclasses import dataclass

from nemo_rl_moe.errors import GenerationError


@dataclass(frozen=True)
class GpuBytes:
    """Sizes, in bytes, of the contents of a GPU's memory that `SharedGpu` counts. Each is a lower bound.

    Attributes:
        process: CUDA context of one process, and the buffers of its communication groups.
        weights: Weights of the trainer.
        training: Gradients, master weights and optimizer moments.
        in_a_step: Further peak memory of a training step.
        measuring: Further peak memory of a log-probability pass.
        buckets: Buffers in which weights are sent, and the engine's copies until a layer is complete.
        engine_weights: Weights of the engine.
        engine_share: Memory of the awake engine: its weights and key-value cache.
        engine_kept: Memory that the sleeping engine does not free, such as graphs and workspaces.
    """

    process: int = 0
    weights: int = 0
    training: int = 0
    in_a_step: int = 0
    measuring: int = 0
    buckets: int = 0
    engine_weights: int = 0
    engine_share: int = 0
    engine_kept: int = 0


@dataclass(frozen=True)
class Entry:
    """Peak memory of a shared GPU at one event, such as "while training", in bytes."""

    event: str
    trainer: int
    engine: int
    processes: int

    @property
    def total(self) -> int:
        return self.trainer + self.engine + self.processes


class SharedGpu:
    """Memory of the fullest GPU that trainer and engines share. Each method records one event before it happens.

    A method raises `GenerationError` if its event is not allowed in the present state, or would exceed the budget.

    Args:
        moves_training_state: Whether training state is moved to the host while responses are generated.
        sizes: Sizes of the memory's contents. If None, only the order of events is checked.
        budget: Number of bytes of the GPU. None if unknown.

    Attributes:
        ledger: Number of bytes at each event so far.
    """

    def __init__(self, *, moves_training_state: bool, sizes: GpuBytes | None = None, budget: int | None = None):
        self._moves = moves_training_state
        self._sizes, self._budget = sizes or GpuBytes(), budget
        self._training_is_here = self._has_room = False
        self._reserved = 0
        self._engine_is_there = self._weights_awake = self._cache_awake = self._has_weights = False
        self.ledger: list[Entry] = []

    # The trainer

    def load(self, event: str = "when a checkpoint is loaded") -> None:
        """Record that all training state is allocated, at the start of workers or when a checkpoint is read."""
        self._require(self._sleeps, event, "engines asleep")
        self._training_is_here, self._has_room = True, False
        self._note(event, self._live)

    def make_room(self) -> None:
        """Record that the trainer frees memory: its allocator's cache, and training state if `moves_training_state`."""
        self._training_is_here = self._training_is_here and not self._moves
        self._reserved, self._has_room = self._live, True

    def measure(self, event: str = "in log-probability passes") -> None:
        self._require(self._sleeps, event, "engines asleep")
        self._has_room = False
        self._note(event, self._live + self._sizes.measuring)

    def train(self, event: str = "while training") -> None:
        self._require(self._sleeps, event, "engines asleep")
        self._training_is_here, self._has_room = True, False
        self._note(event, self._live + self._sizes.in_a_step)

    # The engine

    def start_engine(self, event: str = "when engines start") -> None:
        """Record the start of an engine, which takes all its memory at once. It may replace a dead engine."""
        self._require(self._has_room, event, "memory that the trainer has freed")
        self._engine_is_there = self._weights_awake = self._cache_awake = True
        self._has_weights = False
        self._note(event, self._live)

    def sleep_engine(self) -> None:
        """Record that the engine falls asleep and frees its weights and key-value cache. The weights are lost."""
        self._weights_awake = self._cache_awake = self._has_weights = False

    def receive_weights(self, event: str = "when weights arrive") -> None:
        """Record that the engine receives weights. It first allocates their memory if that was freed for sleep."""
        beside = " beside the cache" if self._cache_awake else ""
        self._require(self._engine_is_there, event, "engines")
        self._require(self._has_room, event, "memory that the trainer has freed")
        self._weights_awake = True
        self._note(f"{event}{beside}", self._live + self._sizes.buckets)
        self._reserved = self._live  # ranks release their buckets
        self._has_weights = True

    def wake_cache(self, event: str = "when the key-value cache wakes") -> None:
        """Record that the engine allocates its key-value cache. `receive_weights` allocates its weights."""
        if self._cache_awake or not self._engine_is_there:
            return
        self._require(self._has_room, event, "memory that the trainer has freed")
        self._cache_awake = True
        self._note(event, self._live)

    def generate(self, event: str = "while responses are generated") -> None:
        self._require(self._weights_awake and self._cache_awake, event, "engines awake")
        self._require(self._has_weights, event, "weights")
        self._note(event, self._live)

    def end_engine(self) -> None:
        """Record that the engine ends or has ended."""
        self.sleep_engine()
        self._engine_is_there = False

    @property
    def _sleeps(self) -> bool:
        return not self._weights_awake and not self._cache_awake

    @property
    def _live(self) -> int:
        return self._sizes.weights + (self._sizes.training if self._training_is_here else 0)

    def _engine_bytes(self) -> int:
        if not self._engine_is_there:
            return 0
        sizes = self._sizes
        if self._cache_awake:
            return sizes.engine_share - (0 if self._weights_awake else sizes.engine_weights)
        return sizes.engine_kept + (sizes.engine_weights if self._weights_awake else 0)

    def _require(self, holds: bool, event: str, wanted: str) -> None:
        if not holds:
            parts = {"weights": self._weights_awake, "key-value cache": self._cache_awake}
            awake = " and ".join(name for name, is_awake in parts.items() if is_awake) or "nothing"
            engines = f"engines (awake: {awake})" if self._engine_is_there else "no engines"
            room = "memory" if self._has_room else "no memory"
            raise GenerationError(
                f"GPUs that trainer and engines share: {event}: expected {wanted}, found {engines}, and the trainer"
                f" has freed {room}"
            )

    def _note(self, event: str, trainer: int) -> None:
        """Add an event to the ledger, during which the trainer needs `trainer` bytes.

        The ledger has the largest such number since `make_room`, because the trainer's allocator keeps freed memory.
        """
        self._reserved = max(self._reserved, trainer)
        processes = self._sizes.process * (2 if self._engine_is_there else 1)
        entry = Entry(event, self._reserved, self._engine_bytes(), processes)
        self.ledger.append(entry)
        if self._budget is not None and entry.total > self._budget:
            raise GenerationError(
                f"GPUs that trainer and engines share: {event}: needs {entry.total / 1e9:.1f} GB, but the GPU has"
                f" {self._budget / 1e9:.1f} GB"
            )


class OwnGpu(SharedGpu):
    """GPUs that trainer and engines do not share, on which every event is allowed at any time."""

    def __init__(self) -> None:
        super().__init__(moves_training_state=False)

    def _require(self, holds: bool, event: str, wanted: str) -> None:
        """Do nothing."""

    def _note(self, event: str, trainer: int) -> None:
        """Do nothing."""
