# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The run's side of an environment's process. The process is replaced if it ends or hangs."""

import asyncio
import os
import pickle
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO

from ray import cloudpickle

from nemo_rl_moe.distributed.child_process import ChildProcess
from nemo_rl_moe.errors import UserError, WorkerDiedError
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.process import serve
from nemo_rl_moe.rollouts.process.connection import Remembered, ServerConnection
from nemo_rl_moe.rollouts.process.serve import READY, EnteredTrajectory, ProcessSettings
from nemo_rl_moe.rollouts.trajectory import Trajectory

START_TIMEOUT_S = 300.0
CLEANUP_S = 5.0
"""Seconds that the environment may take to clean up."""
MOST_ENDS = 5
"""Number of successive processes without an ended trajectory after which the run ends."""
_MOST_LINE = 2000


class RemoteEnvironment:
    """An environment whose code runs in a separate process. The process is replaced if it ends or hangs.

    A trajectory that ends the process fails. The others begin again and get the same responses.

    Args:
        name: Name of the user's code in messages.
        show: Receives each line that the code prints.
        warn: Receives warnings.
    """

    def __init__(self, settings: ProcessSettings, name: str, show: Callable[[str], None], warn: Callable[[str], None]):
        self._settings, self._name, self._show, self._warn = cloudpickle.dumps(settings), name, show, warn
        self._timeout_s = settings.timeout_s
        self._stack = tempfile.TemporaryFile()  # noqa: SIM115  (as long as this)
        self._memory = tempfile.TemporaryFile()  # noqa: SIM115
        self._memory.truncate(os.sysconf("SC_PAGE_SIZE"))
        self._entered = EnteredTrajectory(self._memory.fileno())
        self._process: ServerConnection | None = None
        self._connecting: asyncio.Task[ServerConnection] | None = None
        self._num_ends = 0
        self._is_stopped = False
        self._child = self._begin_start()

    def wait_for_start(self) -> None:
        connection = self._child.connection
        if not connection.poll(START_TIMEOUT_S):
            raise WorkerDiedError(f"{self._name}: the process did not start within {START_TIMEOUT_S:g} s")
        try:
            found = connection.recv_bytes()
        except (EOFError, OSError):
            reason = self._child.reason_of_end()
            raise WorkerDiedError(f"{self._name}: the process ended while starting: {reason}") from None
        if found != READY:
            error = pickle.loads(found)  # noqa: S301  (of the environment)
            raise error if isinstance(error, UserError) else WorkerDiedError(f"{self._name}: cannot start: {error}")

    async def rollout(self, session: Session) -> Trajectory:
        remembered: Remembered = {}
        while True:
            session.trajectory.seen_at = "the start of its process"
            process = await self._running()
            found = await process.make(session, remembered)
            if isinstance(found, Trajectory):
                return found
            if found.fault is not None:
                return session.failed(found.fault, f"the process of its trajectories ended: {found.reason}")

    def stop(self) -> None:
        """End the process. Its environment has `CLEANUP_S` to clean up."""
        self._is_stopped = True
        self._child.end(CLEANUP_S)
        self._entered.close()
        self._memory.close()
        self._stack.close()

    async def _running(self) -> ServerConnection:
        """Return the running process. Start another one if the last one has ended."""
        last = self._process
        if last is not None and not last.has_ended and not self._child.has_ended:
            return last
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.get_running_loop().create_task(self._connect(last))
        return await asyncio.shield(self._connecting)  # a trajectory that is cancelled does not end the start

    async def _connect(self, last: ServerConnection | None) -> ServerConnection:
        if last is not None:
            self._num_ends = 0 if last.num_ended else self._num_ends + 1
            if self._num_ends >= MOST_ENDS:
                reason = f"the process of its trajectories has ended {MOST_ENDS} times in a row"
                raise WorkerDiedError(f"{self._name}: {reason}")
            self._say("the process of its trajectories has ended; another one is started")
            await asyncio.to_thread(self._start_again)
        process = ServerConnection(self._child, self._entered, self._stack, self._timeout_s, self._say)
        await process.start()
        self._process = process
        return process

    def _start_again(self) -> None:
        self._child.kill()
        self._child.reap()
        self._entered.clear()
        self._stack.truncate(0)
        self._child = self._begin_start()
        if self._is_stopped:
            self._child.kill()
        self.wait_for_start()

    def _begin_start(self) -> ChildProcess:
        reading, writing = os.pipe()
        try:
            files = (self._memory.fileno(), self._stack.fileno())
            child = ChildProcess(serve.__name__, writing, files, {"PYTHONUNBUFFERED": "1"})
        finally:
            os.close(writing)
        threading.Thread(target=self._attend, args=(child, os.fdopen(reading, "rb")), daemon=True).start()
        return child

    def _attend(self, child: ChildProcess, lines: IO[bytes]) -> None:
        """Send the settings, then show the output of the process until its end."""
        with suppress(OSError):  # it has ended
            child.connection.send_bytes(self._settings)
        with lines:
            while line := lines.readline(_MOST_LINE):
                if text := line.decode(errors="replace").rstrip():
                    self._show(f"{self._name}: {text}")

    def _say(self, text: str) -> None:
        self._warn(f"{self._name}: {text}")
