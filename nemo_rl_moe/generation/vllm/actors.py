# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The Ray actors of vLLM's engines: start, calls, and replacement of lost ones."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayError

from nemo_rl_moe.distributed.worker_pool import kill
from nemo_rl_moe.errors import GenerationError
from nemo_rl_moe.generation.refit import reason_of
from nemo_rl_moe.generation.vllm.placement import Placement
from nemo_rl_moe.generation.vllm.worker import VllmSettings, VllmWorker

PROGRESS = "progress"
"""Concurrency group of calls that are answered while the actor generates."""
CLOSING_S = 2.0
"""Time for an actor to remove its files."""


@dataclass
class EngineActor:
    number: int
    handle: Any
    results: Any = None
    requests: set[int] = field(default_factory=set)
    progress: int = -1
    since: float = 0.0
    asleep: set[str] = field(default_factory=set)
    window: int = sys.maxsize
    """Maximum number of requests that the engine gets at a time."""

    @property
    def name(self) -> str:
        return f"vLLM engine {self.number}"

    def ask_num_steps(self) -> Any:
        """Ask for the number of steps; return a Ray future. A busy engine answers, too, unless it is frozen."""
        return self.handle.num_steps.options(concurrency_group=PROGRESS).remote()

    def end(self) -> None:
        kill(self.handle)


class EngineActors:
    def __init__(
        self,
        settings: VllmSettings,
        number: int,
        *,
        start_timeout_s: float,
        stall_timeout_s: float,
        placement: Placement,
        warn: Callable[[str], None],
    ):
        self.stall_timeout_s = stall_timeout_s
        self.number = number
        self.present: list[EngineActor] = []
        self.num_started = self.num_lost = 0
        self._settings, self._start_timeout_s = settings, start_timeout_s
        self._placement, self._warn = placement, warn

    def start_missing(self) -> None:
        """Start the missing engines, which have no weights yet.

        An engine that replaces a dead one may start twice: child processes of the dead engine hold their GPU memory
        until they notice its end, and vLLM refuses to start beside them.

        Raises:
            GenerationError: An engine cannot start. All engines have been ended.
        """
        missing = sorted(set(range(self.number)) - {actor.number for actor in self.present})
        if not missing:
            return
        problems = self._start(missing)
        if problems and self.num_started > self.number:
            for actor in [actor for actor in self.present if actor.number in problems]:
                self.present.remove(actor)
                actor.end()
            problems = self._start(sorted(problems))
        if problems:
            self.end_all()
            number, problem = min(problems.items())
            raise GenerationError(f"vLLM engine {number} of {self.number} cannot start: {problem}")
        started = [actor for actor in self.present if actor.number in missing]
        for actor, window in self.ask(lambda handle: handle.window.remote(), started)[0]:
            actor.window = window or sys.maxsize

    def _start(self, numbers: Sequence[int]) -> dict[int, str]:
        """Start engines, and return the problems of those that do not start."""
        actor_class = ray.remote(concurrency_groups={PROGRESS: 1})(VllmWorker)
        started = []
        for number in numbers:
            # With equal seeds, engines would use the same random numbers for different requests.
            seed = self._settings.seed + number + self.num_started * self.number
            settings = replace(self._settings, gpus=self._placement.gpus(number), seed=seed)
            options = self._placement.options(number)
            started.append(EngineActor(number, actor_class.options(**options).remote(settings, list(sys.path))))
        self.present = sorted([*self.present, *started], key=lambda actor: actor.number)
        self.num_started += len(started)
        calls = {actor.handle.start.remote(): actor.number for actor in started}
        ready, late = ray.wait(list(calls), num_returns=len(calls), timeout=self._start_timeout_s)
        problems = {calls[call]: f"did not start within {self._start_timeout_s:g} s" for call in late}
        for call in ready:
            try:
                problem = ray.get(call)
            except RayError as error:
                problem = reason_of(error)
            if problem is not None:
                problems[calls[call]] = problem
        return problems

    def give_up(self, actor: EngineActor, reason: str) -> None:
        """End an engine, and warn with the reason."""
        self.present.remove(actor)
        self.num_lost += 1
        actor.end()
        left = len(self.present)
        if not actor.requests:
            others = "another one takes its place"
        else:
            others = f"the other {left} take over its requests" if left else "engines are started anew"
        self._warn(f"{actor.name} {reason}; {others}")

    def give_up_the_dead(self) -> None:
        """Give up engines that have died since they last generated, or do not answer."""
        questions = {actor.ask_num_steps(): actor for actor in self.present}
        if not questions:
            return
        _, late = ray.wait(list(questions), num_returns=len(questions), timeout=self.stall_timeout_s)
        for question, actor in questions.items():
            try:
                if question not in late:
                    ray.get(question)
                    continue
                reason = f"has not answered for {self.stall_timeout_s:g} s"
            except RayError as error:
                reason = reason_of(error)
            self.give_up(actor, reason)

    def ask(
        self, question: Callable[[Any], Any], actors: Sequence[EngineActor] | None = None
    ) -> tuple[list[tuple[EngineActor, Any]], str | None]:
        """Call actors (default: all) concurrently; return the answers, and name and reason of the last lost actor."""
        calls = [(actor, question(actor.handle)) for actor in (self.present if actors is None else actors)]
        answers: list[tuple[EngineActor, Any]] = []
        lost = None
        for actor, call in calls:
            try:
                answers.append((actor, ray.get(call, timeout=self.stall_timeout_s)))
            except RayError as error:
                lost = f"{actor.name} {reason_of(error)}"
                self.give_up(actor, reason_of(error))
        return answers, lost

    def end_all(self) -> None:
        """End all engines. If one does not answer, the next engine to start removes its files."""
        if self.present and ray.is_initialized():
            with suppress(RayError, ValueError):
                closing = [actor.handle.close.options(concurrency_group=PROGRESS).remote() for actor in self.present]
                ray.wait(closing, num_returns=len(closing), timeout=CLOSING_S)
        while self.present:
            self.present.pop().end()
