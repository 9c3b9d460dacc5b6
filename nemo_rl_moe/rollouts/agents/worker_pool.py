# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver's side of the processes that run agents: leases of processes, and the ends of agents."""

import json
import os
import pickle
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import IO, Any, Self, TypeVar

from nemo_rl_moe.config.user_code import described
from nemo_rl_moe.distributed.child_process import END_LIMIT_S, ChildProcess
from nemo_rl_moe.errors import WorkerDiedError
from nemo_rl_moe.rewards.interface import Fault, Score
from nemo_rl_moe.rewards.user_callable import as_score
from nemo_rl_moe.rollouts.agents import worker
from nemo_rl_moe.rollouts.agents.task import AgentTask
from nemo_rl_moe.rollouts.agents.worker import AGENT_KEY, READY, Program

Result = TypeVar("Result")

START_TIMEOUT_S = 300.0
CANCEL_LIMIT_S = 5.0
"""Seconds that an agent may take to end when it is cancelled, before the process that it shares is killed."""
_STOPPED = "no agent can run: their processes have been stopped"
MOST_LOG_BYTES = 64 << 20
"""Most bytes of the common log of all agents."""
_LOG_LOOK_S = 1.0


@dataclass(frozen=True)
class AgentEnd:
    """How an agent has ended.

    Attributes:
        score: The score that the agent returned. If None, the reward function scores the last response.
        fault: Reason why the agent failed. None if it did not fail.
        metrics: Further numbers that the agent returned.
        turn_rewards: Id of a reply -> reward of its response.
    """

    score: Score | None = None
    fault: Fault | None = None
    message: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: Mapping[str, float] = field(default_factory=dict)


class _Process(ChildProcess):
    """One process that runs agents. A thread reads its answers."""

    def __init__(self, program: Program, log: IO[bytes]):
        super().__init__(worker.__name__, log)
        self.connection.send_bytes(pickle.dumps(program))
        self._sending, self._numbers = threading.Lock(), count()
        self._asked: dict[int, Future[AgentEnd]] = {}
        self._ended_by: str | None = None
        self.reader = threading.Thread(target=self._read, name="answers of agents", daemon=True)

    def wait_for_start(self) -> None:
        if not self.connection.poll(START_TIMEOUT_S):
            raise WorkerDiedError(f"the process of an agent did not start within {START_TIMEOUT_S:g} s")
        try:
            answer = self.connection.recv_bytes()
        except (EOFError, OSError):
            raise WorkerDiedError(f"the process of an agent died while starting: {self.reason_of_end()}") from None
        if answer != READY:
            raise WorkerDiedError(f"the agent cannot be loaded in its process: {answer.decode()}")
        self.reader.start()

    def run(self, task: AgentTask) -> "tuple[int, Future[AgentEnd]]":
        """Start an agent. Return its number in this process, and a future of its end."""
        future: Future[AgentEnd] = Future()
        with self._sending:
            number = next(self._numbers)
            if self._ended_by is not None:
                future.set_result(AgentEnd(fault=Fault.DIED, message=self._ended_by))
                return number, future
            self._asked[number] = future
            with suppress(OSError):  # the reader then sets the end of the agent
                self.connection.send_bytes(pickle.dumps((number, task)))
        return number, future

    def cancel(self, number: int, end: "Future[AgentEnd]") -> None:
        """Cancel one agent of the process. Kill the process if the agent does not end in time."""

        def limit() -> None:
            if not end.done():
                self.kill()  # which also ends a blocked send

        timer = threading.Timer(CANCEL_LIMIT_S, limit)
        timer.daemon = True
        timer.start()
        threading.Thread(target=self._send_end, args=(number,), name="end of an agent", daemon=True).start()

    def _send_end(self, number: int) -> None:
        with self._sending, suppress(OSError):
            if self._ended_by is None:
                self.connection.send_bytes(pickle.dumps((number, None)))

    def _read(self) -> None:
        try:
            while True:
                number, answer = json.loads(self.connection.recv_bytes())
                if not isinstance(answer, dict) or not ("error" in answer or _is_result(answer)):
                    raise ValueError("the agent has written to the connection between its process and the run")
                end = end_of(answer)
                self._asked.pop(number).set_result(end)
        except Exception:  # the process ended, or an agent wrote to the connection
            reason = self.reason_of_end()
        self.kill()
        with self._sending:
            self._ended_by = f"the process of the agent ended: {reason}"
            for number in list(self._asked):
                self._asked.pop(number).set_result(AgentEnd(fault=Fault.DIED, message=self._ended_by))
        self.reap()


_Begun = tuple[_Process, int, "Future[AgentEnd]"]
"""Process, number in it, and future end of an agent that has begun."""


class _Place:
    """A slot for a process. If its process has ended, another one is started."""

    def __init__(self, start: Callable[[], _Process]):
        self._start, self._lock = start, threading.Lock()
        self._process = start()

    def process(self) -> _Process:
        """Wait until the process has started, and return it."""
        with self._lock:
            if self._process.is_over:
                self._process = self._start()
            if self._process.reader.ident is None:
                self._process.wait_for_start()
            return self._process


class AgentRun:
    """The slot of one agent in a process, held from the start of the agent to its end."""

    def __init__(self, workers: "AgentWorkers", place: _Place):
        self._workers, self._place = workers, place
        self._begun: Future[_Begun] | None = None
        self._process: _Process | None = None
        self._is_closed = False

    def start(self, task: AgentTask) -> "Future[AgentEnd]":
        """Start the agent, and return a future of its end."""
        found: Future[AgentEnd] = Future()

        def finish(end: "Future[AgentEnd]") -> None:
            if found.set_running_or_notify_cancel():
                found.set_result(end.result())

        def begin() -> _Begun:
            process = self._process = self._place.process()
            number, end = process.run(task)
            end.add_done_callback(finish)
            return process, number, end

        def note(begun: "Future[_Begun]") -> None:
            error = None if begun.cancelled() else begun.exception()
            if error is not None and found.set_running_or_notify_cancel():
                found.set_exception(error)

        self._begun = self._workers.submit(begin)
        self._begun.add_done_callback(note)
        return found

    def close(self) -> None:
        """End the agent if it still runs, and give its slot to the next one. Do nothing the second time."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._begun is None or self._begun.cancel():
            self._workers.pass_on(self._place)
            return
        if self._process is not None and not self._begun.done() and not self._workers.agents_share_processes:
            self._process.kill()  # it may never take its task
        self._begun.add_done_callback(self._leave)

    def _leave(self, begun: "Future[_Begun]") -> None:
        if begun.exception() is None:
            process, number, end = begun.result()
            if self._workers.agents_share_processes:
                if not end.done():
                    process.cancel(number, end)
                end.add_done_callback(lambda _: self._workers.pass_on(self._place))
                return
            if not end.done():
                process.kill()
        self._workers.pass_on(self._place)


class _LogLimit:
    """Truncates the log when it gets too long. Processes of agents write to it directly, and may never stop."""

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
    """Processes that run agents on the driver's machine, as a context manager.

    A process is replaced if its agent hangs or ends the process.

    Args:
        num_workers: Number of processes. Each runs `program.agents_per_worker` agents at the same time.
        log: File for the output of agents.
    """

    def __init__(self, program: Program, num_workers: int, log: Path):
        self._program = program
        self.agents_share_processes = program.agents_per_worker > 1
        self._log = log.open("ab")
        self._limit = _LogLimit(self._log)
        self._free: deque[_Place] = deque()
        self._waiting: deque[Future[AgentRun]] = deque()
        self._processes: list[_Process] = []
        self._lock, self._is_stopped = threading.Lock(), False
        # Threads that wait until a process starts or takes a task.
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="agents")
        try:
            places = [_Place(self._start) for _ in range(num_workers)]
            for place in places:
                place.process()
            self._free.extend(places * program.agents_per_worker)
        except BaseException:
            self.shutdown()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def lease(self) -> "Future[AgentRun]":
        """Return a future of a slot for one agent in a process.

        Futures get their slots in the order of the calls. Pass each future to `give_back`, even if it has no slot yet.
        """
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

    def pass_on(self, place: _Place) -> None:
        """Give a slot to the next lease, or keep it as free."""
        with self._lock:
            while self._waiting and not self._is_stopped:
                future = self._waiting.popleft()
                if future.set_running_or_notify_cancel():
                    future.set_result(AgentRun(self, place))
                    return
            self._free.append(place)

    def submit(self, call: Callable[[], Result]) -> "Future[Result]":
        """Call a blocking function in a thread. Return its future result."""
        try:
            return self._threads.submit(call)
        except RuntimeError:
            raise WorkerDiedError(_STOPPED) from None

    def shutdown(self) -> None:
        """Stop all processes and their agents. Do nothing the second time."""
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
            if process.reader.ident is None:
                process.reap()
            else:
                process.reader.join(END_LIMIT_S)
        self._limit.stop()
        self._log.close()

    def _start(self) -> _Process:
        with self._lock:
            if self._is_stopped:
                raise WorkerDiedError(_STOPPED)
            self._processes = [each for each in self._processes if not each.is_over or each.reader.is_alive()]
            process = _Process(self._program, self._log)
            self._processes.append(process)
            return process


def _is_result(answer: dict[str, Any]) -> bool:
    has_numbers = isinstance(answer.get("metrics"), dict) and isinstance(answer.get("turn_rewards"), dict)
    return {"result", "is_correct"} <= answer.keys() and has_numbers


def end_of(answer: dict[str, Any]) -> AgentEnd:
    """Return how an agent has ended, from the answer of its process."""
    if "error" in answer:
        return AgentEnd(fault=Fault.ERROR, message=str(answer["error"]))
    result, is_correct, rewards = answer["result"], answer["is_correct"], answer["turn_rewards"]
    score = None
    try:
        if result is not None:
            score = as_score(AGENT_KEY, result if is_correct is None else (result, is_correct))
        for name, reward in rewards.items():
            if not isinstance(reward, int | float):
                raise TypeError(f"{AGENT_KEY} returned turn_rewards[{name!r}] {described(reward)}, expected a number")
    except TypeError as error:
        return AgentEnd(fault=Fault.ERROR, message=str(error))
    return AgentEnd(score, metrics=answer["metrics"], turn_rewards=rewards)
