# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The process that runs the trajectories of one environment."""

import asyncio
import faulthandler
import itertools
import mmap
import os
import pickle
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from nemo_rl_moe.data.continuation import Continuation
from nemo_rl_moe.distributed.child_process import connect
from nemo_rl_moe.distributed.process_limits import limit_memory
from nemo_rl_moe.errors import UserError, WorkerDiedError, one_line
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest
from nemo_rl_moe.rewards.interface import Score, ScoringItem
from nemo_rl_moe.rollouts.ending import ended
from nemo_rl_moe.rollouts.environment import Environment, Session
from nemo_rl_moe.rollouts.process.messages import (
    NO_TRAJECTORY,
    Answer,
    Asked,
    Begin,
    Cancel,
    Ended,
    FromProcess,
    GoesOn,
    Look,
    Seen,
    ToProcess,
    WaitsAside,
    dumps_with_handles,
    read,
    write,
)
from nemo_rl_moe.rollouts.running import RunningTrajectory
from nemo_rl_moe.rollouts.supervisor import SETTLING_TURNS
from nemo_rl_moe.rollouts.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

READY = b"ready"
STACK_AFTER_S = 4.0
"""Seconds after which the stack of code that blocks the process is written."""
_ENTERED = struct.Struct("=Q")


@dataclass(frozen=True)
class ProcessSettings:
    """Settings of a process. They are pickled and sent to the process.

    Attributes:
        start: Starts the environment, in a context that ends with the process.
        continuation: Renders messages that the environment appends.
        max_tokens: Maximum number of tokens of a trajectory.
        reward_weights: Weight of each named reward. None if a score is one number.
        timeout_s: Maximum seconds of one trajectory's code. None for no limit.
        memory_mb: Maximum megabytes of the environment's code. None for no limit.
    """

    start: Callable[[], AbstractContextManager[Environment]]
    tokenizer: "PreTrainedTokenizerBase"
    continuation: Continuation | None
    max_tokens: int
    reward_weights: Mapping[str, float] | None
    timeout_s: float | None
    memory_mb: int | None

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, special tokens in it included."""
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return found


class EnteredTrajectory:
    """Number of the trajectory whose code runs now, in shared memory that the run reads if the process hangs."""

    def __init__(self, file: int):
        self._memory = mmap.mmap(file, _ENTERED.size)

    @property
    def number(self) -> int:
        """Number of the trajectory, `NO_TRAJECTORY` if none runs."""
        found: int = _ENTERED.unpack_from(self._memory)[0]
        return found

    @contextmanager
    def by(self, number: int) -> Iterator[None]:
        """Store the number of a trajectory while its code runs. It remains if the process dies meanwhile."""
        _ENTERED.pack_into(self._memory, 0, number)
        try:
            yield
        finally:
            self.clear()

    def clear(self) -> None:
        _ENTERED.pack_into(self._memory, 0, NO_TRAJECTORY)

    def close(self) -> None:
        self._memory.close()


class _Steps(Coroutine[Any, Any, Trajectory]):
    """A trajectory's coroutine that stores the trajectory's number in `EnteredTrajectory` while its code runs."""

    def __init__(self, coroutine: Coroutine[Any, Any, Trajectory], number: int, entered: EnteredTrajectory):
        self._coroutine, self._number, self._entered = coroutine, number, entered

    def send(self, value: Any) -> Any:
        with self._entered.by(self._number):
            return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        with self._entered.by(self._number):
            return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self._coroutine.__await__()


class _Trajectory:
    """A trajectory of the process. The requests of its session are sent to the run."""

    def __init__(self, number: int, begin: Begin, process: "EnvironmentServer"):
        self._number, self._process, self._model_inputs = number, process, begin.model_inputs
        self._counter = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._unsent: dict[int, GenerationRequest | ScoringItem] = {}
        self._is_aside, self._is_over = False, False
        self._ending: asyncio.Task[None] | None = None
        self.running = RunningTrajectory(self, 0, self._note_change)
        settings = process.settings
        session = Session(
            begin.prompt,
            begin.group_id,
            begin.sampling,
            begin.seed,
            settings.max_tokens,
            self.running,
            settings.tokenizer.decode,
            settings.encode,
            settings.reward_weights,
            dict(begin.model_inputs),
            settings.continuation,
        )
        coroutine = ended(process.environment.rollout(session), session)
        steps = partial(_Steps, number=number, entered=process.entered)
        self.running.start(session, begin.prompt.sample_id, coroutine, settings.timeout_s, steps)

    async def generate(self, request: GenerationRequest) -> GeneratedSequence:
        found: GeneratedSequence = await self._ask(request)
        return found

    async def score(self, item: ScoringItem, place: int) -> Score:
        found: Score = await self._ask(item)
        return found

    def answer(self, answer: Answer) -> None:
        future = self._waiting.pop(answer.number, None)
        if future is not None and not future.done():
            future.set_result(answer.answer)

    def cancel(self) -> None:
        self._is_over = True
        self.running.task.cancel()

    async def _ask(self, request: GenerationRequest | ScoringItem) -> Any:
        number = next(self._counter)
        self._waiting[number] = future = asyncio.get_running_loop().create_future()
        self._unsent[number] = request
        await _settled()
        if self._unsent:  # with all others of this moment
            requests, self._unsent = self._unsent, {}
            self._send(Asked(requests))
        return await future

    def _note_change(self) -> None:
        if self._is_over:
            return
        if self.running.has_ended:
            self._is_over = True
            self._ending = asyncio.get_running_loop().create_task(self._send_end(self._result()))
        elif self._is_aside != (self.running.waits_for == "a process"):
            self._is_aside = not self._is_aside
            self._send(WaitsAside() if self._is_aside else GoesOn())

    def _result(self) -> Trajectory | Exception:
        try:
            self.running.check()
            return self.running.trajectory
        except asyncio.CancelledError:
            return WorkerDiedError("a trajectory was cancelled by its own code")
        except Exception as error:
            return error

    async def _send_end(self, result: Trajectory | Exception) -> None:
        await _settled()
        self._process.forget(self._number)
        try:
            self._send(Ended(result))
        except Exception as error:  # such as an exception that cannot be pickled
            self._send(Ended(WorkerDiedError(f"the end of a trajectory cannot be sent: {one_line(error)}")))

    def _send(self, message: FromProcess) -> None:
        self._process.send(self._number, dumps_with_handles(message, self._model_inputs))


class EnvironmentServer:
    """Runs trajectories until the run closes the connection.

    Args:
        stack: File descriptor to which the call stack is written if code blocks the process.
    """

    def __init__(self, settings: ProcessSettings, environment: Environment, entered: EnteredTrajectory, stack: int):
        self.settings, self.environment, self.entered, self._stack = settings, environment, entered, stack
        self._trajectories: dict[int, _Trajectory] = {}
        self._writer: asyncio.StreamWriter | None = None

    async def serve(self, connection: socket.socket) -> None:
        """Run trajectories until the connection is closed."""
        reader, self._writer = await asyncio.open_connection(sock=connection)
        watch = asyncio.create_task(_write_stack_if_blocked(self._stack))
        try:
            while True:
                number, data = await read(reader)
                self._take(number, pickle.loads(data))  # noqa: S301  (from the run)
        except (asyncio.IncompleteReadError, ConnectionError):
            watch.cancel()

    def send(self, number: int, data: bytes) -> None:
        assert self._writer is not None, "it serves"
        write(self._writer, number, data)

    def forget(self, number: int) -> None:
        self._trajectories.pop(number, None)

    def _take(self, number: int, message: ToProcess) -> None:
        match message:
            case Begin():
                self._trajectories[number] = _Trajectory(number, message, self)
            case Answer():
                if number in self._trajectories:
                    self._trajectories[number].answer(message)
            case Cancel():
                if (trajectory := self._trajectories.pop(number, None)) is not None:
                    trajectory.cancel()
            case Look():
                places = {each: trajectory.running.where() for each, trajectory in self._trajectories.items()}
                self.send(NO_TRAJECTORY, dumps_with_handles(Seen(places), {}))


async def _settled() -> None:
    """Wait until trajectories to which the caller has freed a resource, such as an agent's process, have resumed."""
    # Their requests are sent first, so that they are in the same batch in lockstep as the next request of this one.
    for _ in range(SETTLING_TURNS):
        await asyncio.sleep(0)


async def _write_stack_if_blocked(file: int) -> None:
    """Have the stack written to a file if code blocks the loop for `STACK_AFTER_S`."""
    while True:
        faulthandler.dump_traceback_later(STACK_AFTER_S, file=file)  # the next call restarts the timer
        await asyncio.sleep(STACK_AFTER_S / 5)


def main() -> None:  # pragma: no cover  (runs in another process)
    """Start the environment of a run, and run its trajectories."""
    with connect() as connection, ExitStack() as stack:
        settings: ProcessSettings = pickle.loads(connection.recv_bytes())  # noqa: S301  (from the run)
        try:
            environment = stack.enter_context(settings.start())
        except UserError as error:
            connection.send_bytes(pickle.dumps(error))
            return
        except Exception as error:
            traceback.print_exc()
            connection.send_bytes(pickle.dumps(one_line(error)))
            return
        if settings.memory_mb is not None:
            limit_memory(settings.memory_mb)
        connection.send_bytes(READY)
        server = EnvironmentServer(settings, environment, EnteredTrajectory(int(sys.argv[3])), int(sys.argv[4]))
        asyncio.run(server.serve(socket.socket(fileno=os.dup(connection.fileno()))))


if __name__ == "__main__":  # pragma: no cover
    main()
