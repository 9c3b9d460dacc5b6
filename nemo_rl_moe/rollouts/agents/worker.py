# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The process that runs agents, one after the other. It ends with the driver, and with it all that it has started."""

import asyncio
import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nemo_rl_moe.config.user_code import described, error_in_user_code, import_attribute
from nemo_rl_moe.distributed.process_limits import forget_secrets, limit_memory
from nemo_rl_moe.errors import one_line
from nemo_rl_moe.rollouts.agents.task import AgentTask

AGENT_KEY = "env.driver.program"
REWARD_FILE, BASE_URL, API_KEY, MODEL = "AGENT_REWARD_FILE", "OPENAI_BASE_URL", "OPENAI_API_KEY", "AGENT_MODEL"
READY = b"ready"


@dataclass(frozen=True)
class AgentProgram:
    """The function or the program that drives trajectories.

    Attributes:
        reference: `package.module:function`; None: a command.
        command: Program and arguments.
    """

    reference: str | None
    command: tuple[str, ...]
    memory_mb: int

    def load(self) -> Callable[[AgentTask], object]:  # pragma: no cover  (runs in other processes)
        """Return the function that runs it.

        Raises:
            ConfigurationError: There is no such function.
        """
        if self.reference is None:
            return self._run_command
        function = import_attribute(AGENT_KEY, self.reference)
        return lambda task: _result_of(function, task)

    def _run_command(self, task: AgentTask) -> object:  # pragma: no cover
        """Run the command: the task is its standard input, and it may write a reward to a file."""
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
    """Run the tasks that come through a connection until it is closed."""
    tasks, lifeline = Connection(int(sys.argv[1])), int(sys.argv[2])
    threading.Thread(target=_end_with_driver, args=(lifeline,), daemon=True).start()
    program: AgentProgram = pickle.loads(tasks.recv_bytes())  # noqa: S301  (from the driver)
    forget_secrets()
    limit_memory(program.memory_mb)
    try:
        run = program.load()
    except Exception as error:
        tasks.send_bytes(str(error).encode())
        return
    tasks.send_bytes(READY)
    while True:
        try:
            task: AgentTask = pickle.loads(tasks.recv_bytes())  # noqa: S301
        except EOFError:
            return
        # For clients that are made without arguments.
        os.environ |= {BASE_URL: task.base_url, API_KEY: task.api_key}
        tasks.send_bytes(_answer(run, task))


def _end_with_driver(lifeline: int) -> None:  # pragma: no cover
    os.read(lifeline, 1)  # until the driver has closed its end, or has ended
    os.killpg(0, signal.SIGKILL)


def _answer(run: Callable[[AgentTask], object], task: AgentTask) -> bytes:
    """Return the result of an agent, or its error, as text: what models steer sends the driver no pickles."""
    try:
        result = run(task)
        pair = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        return json.dumps({"result": pair[0], "is_correct": pair[1]}, default=_plain).encode()
    except BaseException as error:  # SystemExit too: it would end the process
        return json.dumps({"error": error_in_user_code(error) or one_line(error)}).encode()


def _plain(value: Any) -> object:
    """Return a number of another library as Python's."""
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
