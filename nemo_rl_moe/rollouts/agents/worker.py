# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The process that runs agents. It ends with the driver, and so do all processes that it has started."""

import asyncio
import inspect
import json
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, cast

from nemo_rl_moe.config.user_code import described, error_in_user_code, import_attribute
from nemo_rl_moe.distributed.child_process import connect
from nemo_rl_moe.distributed.process_limits import forget_secrets, limit_memory
from nemo_rl_moe.errors import one_line
from nemo_rl_moe.rollouts.agents.task import AgentResult, AgentTask

AGENT_KEY = "env.driver.program"
REWARD_FILE, BASE_URL, API_KEY, MODEL = "AGENT_REWARD_FILE", "OPENAI_BASE_URL", "OPENAI_API_KEY", "AGENT_MODEL"
READY = b"ready"


class Program(Protocol):
    """Code that drives trajectories. It is pickled and sent to the processes of agents."""

    @property
    def memory_mb(self) -> int:
        """Return the memory limit of a process in megabytes."""

    @property
    def agents_per_worker(self) -> int:
        """Return the number of agents that run in a process at the same time. If above 1, they must be coroutines."""

    def load(self) -> Callable[[AgentTask], object]:
        """Return the function that runs a task.

        The function returns an `AgentResult`, a reward, a reward and a bool, or an awaitable of one of these.
        """


@dataclass(frozen=True)
class AgentProgram:
    """The user's function (`reference`, as `package.module:function`) or command that drives trajectories."""

    reference: str | None
    command: tuple[str, ...]
    memory_mb: int
    agents_per_worker: int = 1

    def load(self) -> Callable[[AgentTask], object]:  # pragma: no cover  (runs in other processes)
        if self.reference is None:
            return self._run_command
        function: Callable[[AgentTask], object] = import_attribute(AGENT_KEY, self.reference)
        return function

    def _run_command(self, task: AgentTask) -> object:  # pragma: no cover
        """Run the command with the task as its standard input. Return the reward that it wrote to a file, if any."""
        with tempfile.TemporaryDirectory(prefix="agent-") as folder:
            reward_file = Path(folder) / "reward"
            given = {"sample_id": task.sample_id, "record": task.record, "messages": list(task.messages)}
            done = subprocess.run(
                self.command,
                input=json.dumps(given, default=str).encode(),
                stdout=sys.stderr,
                env=os.environ | {MODEL: task.model, REWARD_FILE: str(reward_file)},
                check=False,
            )
            if done.returncode:
                raise RuntimeError(f"{self.command[0]} ended with exit code {done.returncode}")
            return json.loads(reward_file.read_text()) if reward_file.exists() else None


def main() -> None:  # pragma: no cover
    """Run the tasks that the driver sends until it closes the connection."""
    tasks = connect()
    program: Program = pickle.loads(tasks.recv_bytes())  # noqa: S301  (from the driver)
    forget_secrets()
    limit_memory(program.memory_mb)
    try:
        run = program.load()
    except Exception as error:
        tasks.send_bytes(str(error).encode())
        return
    tasks.send_bytes(READY)
    if program.agents_per_worker > 1:
        asyncio.run(_run_together(tasks, run))
        return
    while True:
        try:
            number, task = pickle.loads(tasks.recv_bytes())  # noqa: S301
        except EOFError:
            return
        # For clients that are made without arguments.
        os.environ |= {BASE_URL: task.base_url, API_KEY: task.api_key}
        try:
            answer = answer_of(number, _result_of(run, task))
        except BaseException as error:  # SystemExit too: it would end the process
            answer = _failure(number, error)
        tasks.send_bytes(answer)


async def _run_together(tasks: Connection, run: Callable[[AgentTask], object]) -> None:  # pragma: no cover
    """Run tasks as coroutines of one loop until the connection is closed.

    A message is a task's number with the task. A number with None instead cancels the task with this number.
    """
    loop, is_over = asyncio.get_running_loop(), asyncio.Event()
    running: dict[int, asyncio.Task[None]] = {}

    async def play(number: int, task: AgentTask) -> None:
        try:
            answer = answer_of(number, await cast("Awaitable[object]", run(task)))
        except BaseException as error:  # a cancellation, too
            answer = _failure(number, error)
        del running[number]
        tasks.send_bytes(answer)

    def receive() -> None:
        try:
            number, task = pickle.loads(tasks.recv_bytes())  # noqa: S301
        except EOFError:
            is_over.set()
            return
        except BaseException:  # otherwise the loop continues without the task
            traceback.print_exc()
            os._exit(1)
        if task is not None:
            running[number] = loop.create_task(play(number, task))
        elif number in running:
            running[number].cancel()

    loop.add_reader(tasks.fileno(), receive)
    await is_over.wait()


def answer_of(number: int, result: object) -> bytes:
    """Return the result of an agent as JSON. Pickles would be unsafe, as a model influences the result."""
    pair = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    found = result if isinstance(result, AgentResult) else AgentResult(*pair)
    if not isinstance(found.turn_rewards, Mapping):
        raise TypeError(f"turn_rewards is {described(found.turn_rewards)}, expected the id of a reply -> its reward")
    answer = {
        "result": found.reward,
        "is_correct": found.is_correct,
        "metrics": dict(found.metrics),
        "turn_rewards": dict(found.turn_rewards),
    }
    return json.dumps((number, answer), default=_plain).encode()


def _failure(number: int, error: BaseException) -> bytes:
    return json.dumps((number, {"error": error_in_user_code(error) or one_line(error)})).encode()


def _plain(value: Any) -> object:
    """Return a number of another library, such as numpy, as Python's."""
    item = getattr(value, "item", None)
    if item is None:
        raise TypeError(f"{AGENT_KEY} returned {described(value)}, expected a reward or None")
    return item()


def _result_of(function: Callable[[AgentTask], object], task: AgentTask) -> object:
    result = function(task)
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> object:
    return await result


if __name__ == "__main__":  # pragma: no cover
    main()
