# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The connection to the process of an environment: makes trajectories there, and checks whether the process answers."""

import asyncio
import itertools
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import IO, Any, cast

from nemo_rl_moe.distributed.child_process import ChildProcess
from nemo_rl_moe.errors import one_line
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest
from nemo_rl_moe.rewards.interface import Fault, Score, ScoringItem
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.process.messages import (
    NO_TRAJECTORY,
    Answer,
    Asked,
    Begin,
    Cancel,
    Ended,
    FromProcess,
    GoesOn,
    KeptValues,
    Look,
    Seen,
    ToProcess,
    WaitsAside,
    read,
    write,
)
from nemo_rl_moe.rollouts.process.serve import EnteredTrajectory
from nemo_rl_moe.rollouts.running import innermost
from nemo_rl_moe.rollouts.trajectory import Trajectory

LOOK_S = 1.0
"""Seconds between two looks at the process."""
BLOCKED_S = 5.0
"""Seconds without an answer after which a warning names the code that blocks the process."""
LONGEST_BLOCKED_S = 600.0
"""Seconds without an answer after which the process is replaced, if trajectories have no time limit."""
_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')
Remembered = dict[tuple[Any, ...], GeneratedSequence]
"""Tokens, seed and sampling of a request of a trajectory -> its response."""


@dataclass(frozen=True)
class Lost:
    """End of a process that made trajectories. Only the trajectory that caused the end has a fault."""

    fault: Fault | None
    reason: str


@dataclass
class RemoteTrajectory:
    """A trajectory that the process makes. `session` makes its requests in the run.

    Attributes:
        asking: Tasks that wait for answers to its requests.
        is_aside: Whether it waits for a limited resource of its environment.
    """

    session: Session
    kept: KeptValues
    messages: "asyncio.Queue[FromProcess | Lost]" = field(default_factory=asyncio.Queue)
    asking: "set[asyncio.Task[None]]" = field(default_factory=set)
    is_aside: bool = False

    @property
    def is_waiting(self) -> bool:
        return self.is_aside or bool(self.asking)


class ServerConnection:
    """A process that has started, in the event loop of the runner.

    Args:
        stack: File with the stack of code that blocks the process.
        timeout_s: Maximum seconds of one trajectory's code. None for no limit.
        warn: Receives a line on code that blocks the process.

    Attributes:
        has_ended: Whether the process is ending or has ended.
        num_ended: Number of trajectories that have ended in the process or have ended it.
    """

    def __init__(
        self,
        child: ChildProcess,
        entered: EnteredTrajectory,
        stack: IO[bytes],
        timeout_s: float | None,
        warn: Callable[[str], None],
    ):
        self._child, self._entered, self._stack, self._warn = child, entered, stack, warn
        self._longest_s = LONGEST_BLOCKED_S if timeout_s is None else timeout_s
        self._remotes: dict[int, RemoteTrajectory] = {}
        self._numbers = itertools.count(NO_TRAJECTORY + 1)
        self._looks_unanswered = 0
        self.has_ended, self.num_ended = False, 0

    async def start(self) -> None:
        """Begin to read the messages of the process."""
        connection = socket.socket(fileno=os.dup(self._child.connection.fileno()))
        reader, self._writer = await asyncio.open_connection(sock=connection)
        self._tasks = [asyncio.create_task(self._receive(reader)), asyncio.create_task(self._look())]

    async def make(self, session: Session, remembered: Remembered) -> Trajectory | Lost:
        """Return a trajectory that the process makes, or the reason why it cannot.

        Args:
            session: Makes the requests of the trajectory in the run.
            remembered: Responses that an earlier process got for this trajectory.
        """
        number = next(self._numbers)
        remote = self._remotes[number] = RemoteTrajectory(session, KeptValues(dict(session.model_inputs)))
        try:
            begin = Begin(session.prompt, session.group_id, session.sampling, session.seed, session.model_inputs)
            self._send(number, begin)
            return await self._served(number, remote, remembered)
        except asyncio.CancelledError:
            self._send(number, Cancel())
            raise
        finally:
            del self._remotes[number]
            for task in remote.asking:
                task.cancel()

    async def _served(self, number: int, remote: RemoteTrajectory, remembered: Remembered) -> Trajectory | Lost:
        """Answer the requests of a trajectory until it ends. Return it, or why it was lost."""
        trajectory = remote.session.trajectory
        message = await remote.messages.get()
        while True:
            match message:
                case Asked():
                    for each, request in message.requests.items():
                        asking = self._answer(number, remote, each, request, remembered)
                        remote.asking.add(asyncio.get_running_loop().create_task(asking))
                case WaitsAside():
                    remote.is_aside = True
                    message = await trajectory.wait_aside(remote.messages.get())
                    remote.is_aside = False
                    continue
                case Ended():
                    self.num_ended += 1
                    if isinstance(message.result, Exception):
                        raise message.result
                    return message.result
                case Lost():
                    return message
                case GoesOn():
                    pass
            message = await remote.messages.get()

    async def _answer(
        self,
        number: int,
        remote: RemoteTrajectory,
        asked: int,
        request: GenerationRequest | ScoringItem,
        remembered: Remembered,
    ) -> None:
        """Answer one request of a trajectory. An error of the answer ends the run (`RunningTrajectory.check`)."""
        try:
            answer = await _answer(remote.session, request, remembered)
        except Exception as error:
            remote.messages.put_nowait(Ended(error))
            return
        finally:
            remote.asking.discard(cast("asyncio.Task[None]", asyncio.current_task()))
        self._send(number, Answer(asked, answer))

    def _send(self, number: int, message: ToProcess) -> None:
        if not self.has_ended:
            kept = self._remotes[number].kept if number in self._remotes else KeptValues()
            write(self._writer, number, kept.dumps(message))

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        """Hand messages to their trajectories until the process has ended."""
        try:
            while True:
                number, data = await read(reader)
                if number == NO_TRAJECTORY:
                    self._see(KeptValues().loads(data))
                elif (remote := self._remotes.get(number)) is not None:
                    remote.messages.put_nowait(_loaded(remote, data))
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._lose_ended()
        finally:
            self._writer.close()

    def _see(self, message: FromProcess) -> None:
        assert isinstance(message, Seen)
        self._looks_unanswered = 0
        for number, remote in self._remotes.items():
            remote.session.trajectory.seen_at = message.places.get(number, "its start")

    async def _lose_ended(self) -> None:
        if not self.has_ended:
            self._lose(Lost(Fault.DIED, await asyncio.to_thread(self._child.reason_of_end)))

    def _lose(self, lost: Lost) -> None:
        """Notify trajectories of the end of the process. Do nothing the second time."""
        if self.has_ended:
            return
        self.has_ended, entered = True, self._entered.number
        for number, each in self._remotes.items():
            has_ended_it = number == entered or (entered not in self._remotes and not each.is_waiting)
            self.num_ended += has_ended_it
            each.messages.put_nowait(lost if has_ended_it else replace(lost, fault=None))

    async def _look(self) -> None:
        """Check the process while trajectories run, and kill it if its code blocks it for too long."""
        while not self.has_ended:
            await asyncio.sleep(LOOK_S)
            if self._child.has_ended:  # another process may keep the connection open
                await self._lose_ended()
            if all(each.is_waiting for each in self._remotes.values()):
                self._looks_unanswered = 0
                continue
            self._looks_unanswered += 1
            if self._looks_unanswered == 1:
                self._send(NO_TRAJECTORY, Look())
            # Counts checks instead of seconds, as this loop may rest while the trainer has the engine.
            blocked_s = LOOK_S * (self._looks_unanswered - 1)
            if blocked_s == BLOCKED_S:
                self._warn(
                    f"has blocked the process of its trajectories for {blocked_s:.0f} s ({self._name_of_entered()}"
                    f"{self._where()}), and all others wait meanwhile: await something that does not block, or await"
                    " asyncio.to_thread(...)"
                )
            if blocked_s > self._longest_s:
                reason = f"its code blocked the process for more than {self._longest_s:g} s{self._where()}"
                self._lose(Lost(Fault.TIMEOUT, reason))
                await asyncio.to_thread(self._child.kill)

    def _name_of_entered(self) -> str:
        remote = self._remotes.get(self._entered.number)
        return "code that a trajectory has started" if remote is None else remote.session.trajectory.label

    def _where(self) -> str:
        """Return the line of code that blocks the process, as the end of a message. Empty if it is not known.

        The process has written the stacks of its threads to a file. The last one is the main thread's.
        """
        self._stack.seek(0)
        *_, last = self._stack.read().decode(errors="replace").split("(most recent call first):")
        frames = _FRAME.findall(last)
        return f", at {innermost(frames)}" if frames else ""


def _loaded(remote: RemoteTrajectory, data: bytes) -> FromProcess | Lost:
    """Return a message of a trajectory, or its fault if the message cannot be read."""
    try:
        return remote.kept.loads(data)
    except Exception as error:
        return Lost(Fault.ERROR, f"it sent a message that cannot be read: {one_line(error)}")


async def _answer(
    session: Session, request: GenerationRequest | ScoringItem, remembered: Remembered
) -> GeneratedSequence | Score:
    """Return the answer to a request, from `remembered` if an earlier process got it."""
    if isinstance(request, ScoringItem):
        return await session.trajectory.score(request)
    key = (request.token_ids, request.seed, request.sampling)
    if key not in remembered:
        remembered[key] = await session.trajectory.generate(request)
    return remembered[key]
