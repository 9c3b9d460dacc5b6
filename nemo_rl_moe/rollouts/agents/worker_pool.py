# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver's side of the processes that run agents: who has one, and what comes of it."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import IO, Any, Self

from nemo_rl_moe.errors import WorkerDiedError
from nemo_rl_moe.rewards.interface import Fault, Score
from nemo_rl_moe.rewards.user_callable import as_score
from nemo_rl_moe.rollouts.agents import worker
from nemo_rl_moe.rollouts.agents.task import AgentTask
from nemo_rl_moe.rollouts.agents.worker import AGENT_KEY, READY, AgentProgram

START_TIMEOUT_S = 300.0
_STOPPED = "no agent can run: their processes have been stopped"
_END_LIMIT_S = 10.0
MOST_LOG_BYTES = 64 << 20
"""Output of agents that is kept, all together."""
_LOG_LOOK_S = 1.0


@dataclass(frozen=True)
class AgentEnd:
    """How an agent has ended.

    Attributes:
        score: What it gave; None: nothing, so that the reward function scores.
        fault: Why it gave nothing; None where it ended well.
    """

    score: Score | None = None
    fault: Fault | None = None
    message: str = ""


class _Process:
    """One process that runs agents, in a group of its own with all that they start."""

    def __init__(self, program: AgentProgram, log: IO[bytes]):
        self._tasks, theirs = Pipe()
        reading, self._lifeline = os.pipe()
        files = (theirs.fileno(), reading)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", worker.__name__, *map(str, files)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=files,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": _search_path()},
            )
        finally:
            theirs.close()
            os.close(reading)
        self._lock, self.is_over = threading.Lock(), False
        self._tasks.send_bytes(pickle.dumps(program))

    def wait_for_start(self) -> None:
        """Wait until the agent is loaded.

        Raises:
            WorkerDiedError: It cannot be.
        """
        if not self._tasks.poll(START_TIMEOUT_S):
            raise WorkerDiedError(f"the process of an agent did not start within {START_TIMEOUT_S:g} s")
        try:
            answer = self._tasks.recv_bytes()
        except (EOFError, OSError):
            raise WorkerDiedError(f"the process of an agent died while starting: {self._reason()}") from None
        if answer != READY:
            raise WorkerDiedError(f"the agent cannot be loaded in its process: {answer.decode()}")

    def run(self, task: AgentTask) -> AgentEnd:
        """Run an agent to its end; where it ends the process, that is over."""
        try:
            self._tasks.send_bytes(pickle.dumps(task))
            answer = json.loads(self._tasks.recv_bytes())
            if not isinstance(answer, dict) or not ("error" in answer or {"result", "is_correct"} <= answer.keys()):
                raise ValueError("the agent has written to the process's own connection")
        except (EOFError, OSError, ValueError, RecursionError):
            reason = self._reason()
            self.kill()
            return AgentEnd(fault=Fault.DIED, message=f"the process of the agent ended: {reason}")
        return end_of(answer)

    def kill(self) -> None:
        """End the process, and all that it has started; does nothing the second time."""
        with self._lock:
            if self.is_over:
                return
            self.is_over = True
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            os.close(self._lifeline)

    def reap(self) -> None:
        """Wait for the end of a process that was killed."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_LIMIT_S)
        self._tasks.close()

    def _reason(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_END_LIMIT_S)
            return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return "it has closed its connection"


class AgentRun:
    """A process for one agent, from its start to its end.

    Args:
        workers: Whose it is.
        process: None: one is started.
    """

    def __init__(self, workers: "AgentWorkers", process: _Process | None):
        self._workers, self.process = workers, process
        self._end: Future[AgentEnd] | None = None
        self._is_closed = False

    def start(self, task: AgentTask) -> "Future[AgentEnd]":
        """Start the agent; return its future end."""
        self._end = self._workers.submit(self, task)
        return self._end

    def close(self) -> None:
        """Give the process to the next agent; one whose agent still runs is ended. Does nothing the second time."""
        if self._is_closed:
            return
        self._is_closed = True
        has_ended = self._end is None or (self._end.done() and not self._end.cancelled())
        if self.process is not None and not has_ended:
            self.process.kill()
        if self._end is not None:
            self._end.cancel()
        keeps = has_ended and self.process is not None and not self.process.is_over
        self._workers.pass_on(self.process if keeps else None)

    @property
    def is_closed(self) -> bool:
        """True once nobody waits for the agent."""
        return self._is_closed


class _LogLimit:
    """Begin a log anew when it gets too long: agents write to it themselves, and may write without end.

    Args:
        log: Open at its end, for these processes too.
    """

    def __init__(self, log: IO[bytes]):
        self._log, self._is_over = log, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="log of agents", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_over.wait(_LOG_LOOK_S)
            with suppress(OSError):
                if (size := os.fstat(self._log.fileno()).st_size) > MOST_LOG_BYTES:
                    os.ftruncate(self._log.fileno(), 0)
                    self._log.write(f"[{size:,} bytes of earlier output have been removed]\n".encode())
                    self._log.flush()


class AgentWorkers:
    """Processes that run agents, each one at a time, on the driver's machine; a context manager.

    One whose agent hangs or ends it is replaced.

    Args:
        program: What drives trajectories.
        num_workers: Agents that run at the same time.
        log: File that gets what agents print.

    Raises:
        WorkerDiedError: The agent cannot be loaded in a process.
    """

    def __init__(self, program: AgentProgram, num_workers: int, log: Path):
        self._program = program
        self._log = log.open("ab")
        self._limit = _LogLimit(self._log)
        self._free: deque[_Process | None] = deque()
        self._waiting: deque[Future[AgentRun]] = deque()
        self._processes: set[_Process] = set()
        self._lock, self._is_stopped = threading.Lock(), False
        # A thread for each process: it waits for the agent, and not for an event loop, of which a run has several.
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="agents")
        try:
            started = [self._start() for _ in range(num_workers)]
            for process in started:
                process.wait_for_start()
            self._free.extend(started)
        except BaseException:
            self.shutdown()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def lease(self) -> "Future[AgentRun]":
        """Ask for a process: who asks first gets the first that is free. `give_back` it in any case."""
        future: Future[AgentRun] = Future()
        with self._lock:
            if self._is_stopped:
                future.set_exception(WorkerDiedError(_STOPPED))
            elif self._free:
                future.set_result(AgentRun(self, self._free.popleft()))
            else:
                self._waiting.append(future)
        return future

    def give_back(self, leased: "Future[AgentRun]") -> None:
        """End a lease, whether it was granted or not."""
        if not leased.cancel() and leased.exception() is None:
            leased.result().close()

    def pass_on(self, process: _Process | None) -> None:
        """Give a process to who waits for one; None: another takes its place."""
        with self._lock:
            while self._waiting and not self._is_stopped:
                future = self._waiting.popleft()
                if future.set_running_or_notify_cancel():
                    future.set_result(AgentRun(self, process))
                    return
            self._free.append(process)

    def submit(self, run: AgentRun, task: AgentTask) -> "Future[AgentEnd]":
        """Have a thread run an agent."""
        try:
            return self._threads.submit(self._run, run, task)
        except RuntimeError:
            raise WorkerDiedError(_STOPPED) from None

    def shutdown(self) -> None:
        """Stop all processes, and so the agents that run. Does nothing the second time."""
        with self._lock:
            if self._is_stopped:
                return
            self._is_stopped = True
            waiting, processes = list(self._waiting), list(self._processes)
        for process in processes:
            process.kill()
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(WorkerDiedError(_STOPPED))
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in processes:
            process.reap()
        self._limit.stop()
        self._log.close()

    def _run(self, run: AgentRun, task: AgentTask) -> AgentEnd:
        process = run.process
        if process is None:
            run.process = process = self._start()
            process.wait_for_start()
        if run.is_closed:
            process.kill()
        try:
            return process.run(task)
        finally:
            if process.is_over:
                process.reap()
                with self._lock:
                    self._processes.discard(process)

    def _start(self) -> _Process:
        with self._lock:
            if self._is_stopped:
                raise WorkerDiedError(_STOPPED)
            process = _Process(self._program, self._log)
            self._processes.add(process)
            return process


def end_of(answer: dict[str, Any]) -> AgentEnd:
    """Return how an agent has ended, by what its process answers."""
    if "error" in answer:
        return AgentEnd(fault=Fault.ERROR, message=str(answer["error"]))
    result, is_correct = answer["result"], answer["is_correct"]
    if result is None:
        return AgentEnd()
    try:
        return AgentEnd(as_score(AGENT_KEY, result if is_correct is None else (result, is_correct)))
    except TypeError as error:
        return AgentEnd(fault=Fault.ERROR, message=str(error))


def _search_path() -> str:
    """Return where this process looks for modules, so that the agent is found where its check found it."""
    return os.pathsep.join(str(Path(folder).absolute()) for folder in sys.path)
