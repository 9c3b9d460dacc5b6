# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The account of a GPU that a rank of the trainer and one of an engine use in turn: who holds what, and who may go on.

The policy and the engine report each event before they act. One that would come too early, such as a request to an
engine that sleeps or an engine that wakes beside the trainer's full allocator, is an error that says what was missing,
in place of a GPU without memory or of a wait without end. With the sizes of the parts, `plan` follows the same account.
"""

from dataclasses import dataclass

from nemo_rl_moe.errors import GenerationError


@dataclass(frozen=True)
class GpuBytes:
    """Bytes of what lies on a GPU, at least; without sizes only the order of events is followed.

    Attributes:
        process: Each process's context and the buffers of its groups.
        weights: The trainer's.
        training: Gradients, master weights and moments.
        in_a_step: What a step takes besides, at its fullest.
        measuring: What a log-probability pass takes besides, at its fullest.
        buckets: Of weights that are sent, and what an engine keeps of them until a layer is complete.
        engine_weights: An engine's.
        engine_share: Of an engine that is awake: weights and key-value cache.
        engine_kept: What an engine keeps while it sleeps: graphs, workspaces.
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
    """Most bytes at one event."""

    event: str
    trainer: int
    engine: int
    processes: int

    @property
    def total(self) -> int:
        return self.trainer + self.engine + self.processes


class SharedGpu:
    """The account of the fullest GPU.

    Args:
        moves_training_state: It goes to the host while responses are generated.
        sizes: Of the parts.
        budget: Bytes of the GPU; None: unknown.

    Attributes:
        ledger: What lay on the GPU at each event so far.

    Raises:
        GenerationError: By each event that may not come now, or that the budget does not allow.
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
        """Make the whole training state, as workers start or a checkpoint is read."""
        self._require(self._sleeps, event, "engines asleep")
        self._training_is_here, self._has_room = True, False
        self._note(event, self._live)

    def make_room(self) -> None:
        """Move what moves, and give back what the allocator keeps."""
        self._training_is_here = self._training_is_here and not self._moves
        self._reserved, self._has_room = self._live, True

    def measure(self, event: str = "in log-probability passes") -> None:
        """Compute log-probabilities of a batch, while engines sleep."""
        self._require(self._sleeps, event, "engines asleep")
        self._has_room = False
        self._note(event, self._live + self._sizes.measuring)

    def train(self, event: str = "while training") -> None:
        """Take optimizer steps."""
        self._require(self._sleeps, event, "engines asleep")
        self._training_is_here, self._has_room = True, False
        self._note(event, self._live + self._sizes.in_a_step)

    # The engine

    def start_engine(self, event: str = "when engines start") -> None:
        """Start one with its whole share, which it takes at once; also in the place of one that died."""
        self._require(self._has_room, event, "room beside the trainer")
        self._engine_is_there = self._weights_awake = self._cache_awake = True
        self._has_weights = False
        self._note(event, self._live)

    def sleep_engine(self) -> None:
        """Free its weights and key-value cache; the weights are lost."""
        self._weights_awake = self._cache_awake = self._has_weights = False

    def receive_weights(self, event: str = "when weights arrive") -> None:
        """Take the memory of its weights, if they sleep, and the weights."""
        beside = " beside the cache" if self._cache_awake else ""
        self._require(self._engine_is_there, event, "engines")
        self._require(self._has_room, event, "room beside the trainer")
        self._weights_awake = True
        self._note(f"{event}{beside}", self._live + self._sizes.buckets)
        self._reserved = self._live  # ranks give back what they have sent from
        self._has_weights = True

    def wake_cache(self, event: str = "when the key-value cache wakes") -> None:
        """Take the memory of its key-value cache; that of weights which sleep is taken when they come."""
        if self._cache_awake or not self._engine_is_there:
            return
        self._require(self._has_room, event, "room beside the trainer")
        self._cache_awake = True
        self._note(event, self._live)

    def generate(self, event: str = "while responses are generated") -> None:
        """Generate or score."""
        self._require(self._weights_awake and self._cache_awake, event, "engines awake")
        self._require(self._has_weights, event, "weights")
        self._note(event, self._live)

    def end_engine(self) -> None:
        """End it, or notice that it has ended."""
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
            room = "room" if self._has_room else "no room"
            raise GenerationError(
                f"GPUs that trainer and engines share: {event}: expected {wanted}, found {engines} and {room} beside"
                " the trainer"
            )

    def _note(self, event: str, trainer: int) -> None:
        """Note what lies there; what the trainer frees, its allocator keeps until it makes room."""
        self._reserved = max(self._reserved, trainer)
        processes = self._sizes.process * (2 if self._engine_is_there else 1)
        entry = Entry(event, self._reserved, self._engine_bytes(), processes)
        self.ledger.append(entry)
        if self._budget is not None and entry.total > self._budget:
            raise GenerationError(
                f"GPUs that trainer and engines share: {event}: {entry.total / 1e9:.1f} GB of {self._budget / 1e9:.1f}"
            )


class OwnGpu(SharedGpu):
    """The account of GPUs that trainer and engines do not share: everything may come at any time."""

    def __init__(self) -> None:
        super().__init__(moves_training_state=False)

    def _require(self, holds: bool, event: str, wanted: str) -> None:
        """Require nothing."""

    def _note(self, event: str, trainer: int) -> None:
        """Note nothing."""
