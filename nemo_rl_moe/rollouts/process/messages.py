# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Messages between a run and the process of an environment's code, and their serialization.

Large values stay in the run. The process gets handles of routed experts, sampling masks and images.
"""

import asyncio
import io
import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.distributed.batch import ModelInput
from nemo_rl_moe.distributed.stored_rows import Piece
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest, SamplingParameters
from nemo_rl_moe.rewards.interface import Score, ScoringItem
from nemo_rl_moe.rollouts.trajectory import Trajectory

_HEAD = struct.Struct("!QQ")
NO_TRAJECTORY = 0
"""Number in messages that belong to no trajectory. Trajectories count from 1."""


@dataclass(frozen=True)
class Begin:
    """Begin a trajectory with these attributes of its session."""

    prompt: Prompt
    group_id: str
    sampling: SamplingParameters
    seed: int
    model_inputs: Mapping[str, ModelInput]


@dataclass(frozen=True)
class Asked:
    """A trajectory asks for sequences or a score.

    Attributes:
        requests: Number of a request in its trajectory -> the request. An engine in lockstep gets them together.
    """

    requests: Mapping[int, GenerationRequest | ScoringItem]


@dataclass(frozen=True)
class Answer:
    """The answer to a request."""

    number: int
    answer: GeneratedSequence | Score


@dataclass(frozen=True)
class WaitsAside:
    """A trajectory waits for a limited resource of its environment. Its next message ends the wait."""


@dataclass(frozen=True)
class GoesOn:
    """The wait of a trajectory has ended."""


@dataclass(frozen=True)
class Ended:
    """A trajectory has ended, or has raised an error that ends the run."""

    result: Trajectory | Exception


@dataclass(frozen=True)
class Cancel:
    """The run has cancelled a trajectory."""


@dataclass(frozen=True)
class Look:
    """Asks the process for the lines of code at which its trajectories wait."""


@dataclass(frozen=True)
class Seen:
    """The answer to `Look`: number of a trajectory -> line of code at which it waits."""

    places: Mapping[int, str]


FromProcess = Asked | WaitsAside | GoesOn | Ended | Seen
ToProcess = Begin | Answer | Cancel | Look


@dataclass(frozen=True)
class Handle:
    """A reference to a value that stays in the run. `key` is its key in the `KeptValues` of the trajectory."""

    key: str

    def __reduce__(self) -> tuple[Any, ...]:
        return Handle, (self.key,)


@dataclass
class KeptValues:
    """Values of one trajectory that stay in the run: model inputs by name, routed experts and sampling masks."""

    values: dict[str, Any] = field(default_factory=dict)

    def dumps(self, message: ToProcess) -> bytes:
        """Serialize a message with handles instead of routed experts and sampling masks."""

        def reduce(value: Any) -> Any:
            if not isinstance(value, Piece):
                return NotImplemented
            key = f"rows {len(self.values)}"
            self.values[key] = value.source
            return Piece, (Handle(key), *value[1:])

        return _dumps(message, reduce)

    def loads(self, data: bytes) -> FromProcess:
        """Deserialize a message of the process, with values instead of handles."""
        found: FromProcess = _Unpickler(data, self.values).load()
        return found


def dumps_with_handles(message: FromProcess, model_inputs: Mapping[str, ModelInput]) -> bytes:
    """Serialize a message of the process with handles instead of the inputs that the run has sent."""
    names = {id(value): name for name, value in model_inputs.items()}

    def reduce(value: Any) -> Any:
        return (Handle, (names[id(value)],)) if id(value) in names else NotImplemented

    return _dumps(message, reduce)


def _dumps(message: object, reduce: Callable[[Any], Any]) -> bytes:
    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            return reduce(value)

    buffer = io.BytesIO()
    Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(message)
    return buffer.getvalue()


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, values: Mapping[str, Any]):
        super().__init__(io.BytesIO(data))
        self._values = values

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (Handle.__module__, Handle.__qualname__):
            return self._values.__getitem__
        return super().find_class(module, name)


def write(writer: asyncio.StreamWriter, number: int, data: bytes) -> None:
    """Write a message of a trajectory without waiting until it is read."""
    writer.write(_HEAD.pack(number, len(data)) + data)


async def read(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Return the number of a trajectory, and its next message.

    Raises:
        asyncio.IncompleteReadError, ConnectionError: The other side has closed the connection.
    """
    number, size = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    return number, await reader.readexactly(size)
