# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rollout functions for tests of the process that runs them; `train:1` is the faulty one."""

import asyncio
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.rewards.interface import Score
from nemo_rl_moe.rollouts.environment import Environment, Session
from nemo_rl_moe.rollouts.rollout_function import RolloutFunction
from nemo_rl_moe.rollouts.trajectory import Trajectory
from tests.support.grpo_fakes import as_numbers, from_numbers

FAULTY = "train:1"


class NumbersTokenizer:
    """Text is the numbers of its tokens."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return as_numbers(token_ids)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return from_numbers(text)


def start(name: str) -> AbstractContextManager[Environment]:
    """Start the environment of a function of this module."""
    function = InPlace() if name == "in_place" else globals()[name]
    return nullcontext(RolloutFunction(function, name))


def cannot_start() -> AbstractContextManager[Environment]:
    raise ValueError("the library is too old")


def is_wrong() -> AbstractContextManager[Environment]:
    raise ConfigurationError("env.driver: is wrong")


def exits_at_start() -> AbstractContextManager[Environment]:
    os._exit(3)


@contextmanager
def cleans_up() -> Iterator[Environment]:
    """Write a file at the end."""
    yield RolloutFunction(two_turns, "two_turns")
    Path(os.environ["FILE_OF_TESTS"]).write_text("yes")


async def waits_a_little(session: Session) -> Trajectory:
    """Await something else than an answer, while others are answered."""
    await session.generate()
    await asyncio.sleep(0.01)
    return session.finish(await session.score())


async def two_turns(session: Session) -> Trajectory:
    """Ask twice with an observation between, and have the last response scored."""
    await session.generate()
    session.append([7, 8])
    await session.generate()
    session.metrics["process"] = float(os.getpid())
    return session.finish(await session.score(), {"turns": 2.0})


async def with_fault(session: Session) -> Trajectory:
    """Ask once; the faulty trajectory then does what its seed says."""
    await session.generate()
    if session.prompt.sample_id == FAULTY:
        await fault()
    return await two_turns(session)


async def fault() -> None:
    """Do what the environment variable names."""
    match os.environ["FAULT_OF_TESTS"]:
        case "blocks":
            while True:
                with suppress(Exception):
                    pass
        case "blocks in a task":
            await asyncio.gather(_block(), asyncio.sleep(0))
        case "exits":
            os._exit(3)
        case "forks and exits":
            if os.fork() == 0:
                time.sleep(30.0)
                os._exit(0)
            os._exit(3)
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raises SystemExit":
            sys.exit("enough")
        case "allocates":
            kept = deque[bytearray]()
            while True:
                kept.append(bytearray(1 << 24))
        case "hangs":
            await asyncio.Event().wait()
        case "prints":
            print("a line of the user's")
            sys.stderr.write("and one of an error\n")


async def _block() -> None:
    while True:
        pass


class InPlace:
    """Ask while this holds the only place."""

    def __init__(self) -> None:
        self._place = asyncio.Semaphore(1)

    async def __call__(self, session: Session) -> Trajectory:
        async with session.place(self._place.acquire, lambda taken: self._place.release()):
            await asyncio.sleep(0.01)
            return await two_turns(session)


async def asks_again(session: Session) -> Trajectory:
    """Give up on a response that takes too long, and ask for another one."""
    with suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            await session.generate()
    return await two_turns(session)


async def returns_nothing(session: Session) -> Trajectory:
    """End otherwise than with a trajectory."""
    await session.generate()
    return session.finish(Score(1.0, is_correct=True)) if session.prompt.sample_id != FAULTY else None  # type: ignore[return-value]
