# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of a run as users write them, named in configurations as `tests.support.custom_parts:NAME`, and wrong ones."""

import asyncio
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.rewards.interface import Score, ScoringItem
from nemo_rl_moe.rl.estimators.interface import EstimatorInputs
from nemo_rl_moe.rl.objectives import ObjectiveInputs
from nemo_rl_moe.rollouts.environment import Environment, Session
from nemo_rl_moe.rollouts.rollout_function import RolloutFunction
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.runs.folder.metrics import RunOutcome
from nemo_rl_moe.runs.loggers.interface import LoggerBase

NAME = "tests.support.custom_parts"
NOT_CALLABLE = 3


class Digits:
    """Environment that wants digits; graded, and right from a number of them on."""

    def __init__(self, least: int, step: float = 0.25) -> None:
        self._least, self._step = least, step

    def score(self, item: ScoringItem) -> Score:
        number = sum(character.isdigit() for character in item.response)
        return Score(self._step * number, number >= self._least)


def from_median(step: EstimatorInputs) -> torch.Tensor:
    """Return the estimator with the group's median as baseline."""
    return step.rewards - step.rewards.median(dim=1, keepdim=True).values


def from_median_of_tokens(step: EstimatorInputs) -> torch.Tensor:
    """Return the same for each token."""
    return from_median(step)[:, :, None].expand(step.token_mask.shape)


def doubled(inputs: ObjectiveInputs) -> torch.Tensor:
    """Return the objective of twice PPO's loss, without a clip."""
    return -2 * inputs.ratio * inputs.advantages


class LinesLogger:
    """Logger of one JSON line a step."""

    name, run_id, announcement, seconds_to_close, last_step = "lines", None, None, 0.0, -1

    def __init__(self, run_folder: Path) -> None:
        self._file = (run_folder / "lines.jsonl").open("a")

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, "keys": sorted(metrics)}) + "\n")
        self._file.flush()

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({"sections": sorted(config)}) + "\n")

    def log_plots(self, step: int, plots: Mapping[str, bytes]) -> None:
        pass

    def close(self, outcome: RunOutcome = "finished") -> None:
        self._file.close()


class MisspelledLogger(LoggerBase):
    """Logger whose `log_step` has another name."""

    def __init__(self, run_folder: Path) -> None:
        pass

    def log_steps(self, step: int, metrics: Mapping[str, float]) -> None:
        pass


def two_arguments(rewards: torch.Tensor, config: Any) -> torch.Tensor:
    return rewards


def one_for_each_group(step: EstimatorInputs) -> torch.Tensor:
    return step.rewards.mean(dim=1)


def divided_by_the_spread(step: EstimatorInputs) -> torch.Tensor:
    rewards = step.rewards
    return (rewards - rewards.mean(dim=1, keepdim=True)) / rewards.std(dim=1, keepdim=True)


def raising(*arguments: Any) -> torch.Tensor:
    raise KeyError("no such key")  # raising


def raising_below(*arguments: Any) -> torch.Tensor:
    return torch.stack([torch.ones(2), torch.ones(3)])  # raising_below


def mean_loss(inputs: ObjectiveInputs) -> torch.Tensor:
    return -(inputs.ratio * inputs.advantages).mean()


def detached(inputs: ObjectiveInputs) -> torch.Tensor:
    return -inputs.ratio.detach() * inputs.advantages


def without_numbers(inputs: ObjectiveInputs) -> torch.Tensor:
    return inputs.logprobs * torch.nan


def leaving(inputs: ObjectiveInputs) -> torch.Tensor:
    raise SystemExit(3)


def makes_a_number() -> int:
    return 3


FAULTY = "train:1"


class NumbersTokenizer:
    """Text is the numbers of its tokens."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [int(word) for word in text.split()]


def start(name: str) -> AbstractContextManager[Environment]:
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


async def two_at_once(session: Session) -> Trajectory:
    """Ask for two responses to other tokens at the same time."""
    prompts = [[*session.prompt.token_ids, token] for token in (7, 8)]
    for prompt, sampled in zip(prompts, await asyncio.gather(*map(session.sample, prompts)), strict=True):
        session.add_sampled(session.begin_sequence(prompt, []), sampled)
    return session.finish(await session.score())


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
