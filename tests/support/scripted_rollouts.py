# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Asynchronous rollouts by a script: how long a group takes, or how it fails, a trainer that sleeps, and an engine."""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from nemo_rl_moe.data.prompts import PromptLoader
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationEngine, GenerationRequest
from nemo_rl_moe.generation.lockstep import LockstepEngine
from nemo_rl_moe.rollouts.dispatch.admission import Bounds
from nemo_rl_moe.rollouts.dispatch.dispatcher import Dispatcher, Partial
from nemo_rl_moe.rollouts.dispatch.groups import Batch, Cancellation, Ticket
from nemo_rl_moe.rollouts.dispatch.prompts import PromptFeed, QueueState, TicketSource
from nemo_rl_moe.rollouts.dispatch.staleness import OnStale, StalenessPolicy, make_policy
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.weight_sync.transport import WeightTransport
from tests.support.clocks_and_disks import NothingLeftError, run_virtually
from tests.support.grpo_fakes import END_TOKEN, prompts

STUCK = float("inf")
Fate = float | Exception | type[BaseException] | asyncio.Event
"""Seconds of a group, `STUCK`, the error that it raises, or what it waits for."""


@dataclass(frozen=True)
class ScriptedPrompt:
    """A prompt that is nothing but its number."""

    sample_id: str


def scripted_prompts(count: int) -> Iterator[ScriptedPrompt]:
    return (ScriptedPrompt(f"prompt {number}") for number in range(count))


class ScriptedRun:
    """A dispatcher over scripted groups. A group is the text `position/attempt`.

    Args:
        fates: Of the group of each ticket; a mapping: by position, 1 second where there is none.
        groups_per_step, max_staleness, concurrency, target_lag, updates_per_step: The bounds.
        policy: Name of the policy, or a policy.
        on_stale, partial, deadline_s: As the dispatcher's.
        num_prompts: Prompts that there are.
        max_faults: Groups of a prompt that may fail.
        state: Where the run goes on.
        feed: Gives out the tickets; None: the numbered prompts.

    Attributes:
        dispatched: Tickets whose generation has begun, restarts included.
        batches: What was trained on.
        cancelled: What was cancelled, as the batches and `stop` say.
        cleaned_up: Positions of groups that have seen their cancellation.
        engine_versions: Version of the engines when each group was begun, or begun again.
    """

    def __init__(
        self,
        fates: Mapping[int, Fate] | Callable[[Ticket], Fate] = MappingProxyType({}),
        *,
        groups_per_step: int = 2,
        max_staleness: int = 1,
        concurrency: int | None = None,
        target_lag: int | None = None,
        updates_per_step: int = 1,
        policy: str | StalenessPolicy = "in_order",
        on_stale: OnStale = "wait",
        partial: Partial = "continue",
        deadline_s: float | None = None,
        num_prompts: int = 8,
        max_faults: int = 2,
        state: QueueState | None = None,
        feed: TicketSource | None = None,
    ):
        self._fate = fates if callable(fates) else lambda ticket: fates.get(ticket.position, 1.0)
        self.bounds = Bounds(groups_per_step, max_staleness, concurrency, target_lag, updates_per_step)
        self.dispatched: list[Ticket] = []
        self.batches: list[Batch] = []
        self.cancelled: list[Cancellation] = []
        self.cleaned_up: list[int] = []
        self.engine_versions: dict[str, int] = {}
        self.dispatcher = Dispatcher(
            self.make_group,
            PromptFeed(scripted_prompts(num_prompts), num_prompts, max_faults) if feed is None else feed,
            make_policy("policy", policy, self.bounds, on_stale) if isinstance(policy, str) else policy,
            partial=partial,
            deadline_s=deadline_s,
            state=state,
        )

    async def make_group(self, ticket: Ticket) -> str:
        """Take as long as the script says, or fail."""
        self.dispatched.append(ticket)
        self.engine_versions[f"{ticket.position}/{ticket.attempt}"] = self.dispatcher.version
        fate = self._fate(ticket)
        try:
            if isinstance(fate, asyncio.Event):
                await fate.wait()
            elif isinstance(fate, float | int):
                await (asyncio.sleep(fate) if fate < STUCK else asyncio.get_running_loop().create_future())
            else:
                await asyncio.sleep(0)
                raise fate
        except asyncio.CancelledError:
            self.cleaned_up.append(ticket.position)
            raise
        return f"{ticket.position}/{ticket.attempt}"

    async def take(self, version: int | None = None) -> Batch | None:
        """Wait for the groups of a step; by default of the engines' version."""
        batch = await self.dispatcher.next_batch(self.dispatcher.version if version is None else version)
        if batch is not None:
            self.batches.append(batch)
            self.cancelled += batch.cancelled
        return batch

    async def update(self, seconds: float = 0.0) -> None:
        """Bring the weights of the next step to the engines."""
        version = self.dispatcher.version + self.bounds.updates_per_step
        await self.dispatcher.update_pending(version)
        await asyncio.sleep(seconds)
        self.dispatcher.updated(version)

    async def train(self, num_steps: int = 10**9, step_s: float = 1.0, update_s: float = 0.0) -> int:
        """Train so many steps, or until no group is left; return the number of steps."""
        for step in range(num_steps):
            if await self.take() is None:
                return step
            await asyncio.sleep(step_s)
            await self.update(update_s)
        return num_steps

    async def stop(self) -> None:
        self.cancelled += await self.dispatcher.stop()

    def state(self) -> QueueState:
        return self.dispatcher.state(self.dispatcher.version)

    @property
    def consumed(self) -> list[list[int]]:
        return [[found.ticket.position for found in batch.groups] for batch in self.batches]

    @property
    def positions(self) -> list[int]:
        return sorted(position for step in self.consumed for position in step)

    @property
    def lags(self) -> list[list[int]]:
        return [[each.total for each in batch.staleness] for batch in self.batches]

    def reasons(self) -> list[tuple[int, str]]:
        return [(each.position, str(each.reason)) for each in self.cancelled]

    def check_each_group_ended_once(self) -> None:
        """Check that every group that was admitted, and lives no longer, has one end and no second one."""
        ends = [found.group for batch in self.batches for found in batch.groups]
        ends += [f"{each.position}/{each.attempt}" for each in self.cancelled]
        live = {f"{ticket.position}/{ticket.attempt}" for ticket in self.dispatcher.running}
        live |= {found.group for found in self.dispatcher.queue}
        admitted = {f"{ticket.position}/{ticket.attempt}" for ticket in self.dispatched}
        assert sorted(ends) == sorted(set(ends)), "a group ended twice"
        assert set(ends) | live >= admitted, f"lost: {admitted - set(ends) - live}"
        assert not set(ends) & live
        counts = self.dispatcher.admission
        assert (counts.rejected, counts.live) == (len(self.cancelled), len(live))


Planted = Callable[[pytest.MonkeyPatch], None]
FOUND = (AssertionError, NothingLeftError, ValueError, KeyError)
"""What shows a fault: a broken promise, a deadlock, or counts that do not add up."""


def red_on(*faults: Planted) -> Callable[[Callable[[], Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Run a script in virtual time as it is, and once with each planted fault, on which it must not pass."""

    def decorate(script: Callable[[], Coroutine[Any, Any, None]]) -> Callable[..., None]:
        plants: Sequence[Planted | None] = (None, *faults)

        @pytest.mark.parametrize("planted", plants, ids=["right", *(fault.__name__ for fault in faults)])
        def test(planted: Planted | None, monkeypatch: pytest.MonkeyPatch) -> None:
            if planted is None:
                run_virtually(script())
                return
            planted(monkeypatch)
            with pytest.raises(FOUND):
                run_virtually(script())

        functools.update_wrapper(test, script, assigned=("__name__", "__doc__", "__module__", "__qualname__"))
        del test.__wrapped__  # type: ignore[attr-defined]  # pytest would read the script's parameters
        return test

    return decorate


@dataclass
class ScriptedEngine(GenerationEngine):
    """Samples one token after the other; each depends on its seed, its place and the weights at its time.

    Attributes:
        token_s: Seconds of a token.
        version: Optimizer steps of the weights.
        seeds: Of all requests.
        most_running: Most requests that were answered at the same time.
    """

    token_s: float = 0.0
    version: int = 0
    shares_weights: bool = False
    seeds: list[int] = field(default_factory=list)
    most_running: int = 0
    num_running: int = 0

    async def generate(self, request: GenerationRequest) -> GeneratedSequence:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            return await self._sampled(request)
        finally:
            self.num_running -= 1

    async def _sampled(self, request: GenerationRequest) -> GeneratedSequence:
        self.seeds.append(request.seed)
        token_ids, versions = list[int](), list[int]()
        for place in range(2 + request.seed % 4):
            await asyncio.sleep(self.token_s)
            token_ids.append(5 + (request.seed // 10**place + 3 * self.version) % 10)
            versions.append(self.version)
        token_ids, versions = [*token_ids, END_TOKEN], [*versions, self.version]
        return GeneratedSequence(np.array(token_ids), np.full(len(versions), -0.25), False, np.array(versions))

    def update_weights(self, transport: WeightTransport, version: int) -> None:
        raise AssertionError("the script says which weights there are")


class TwoTurns:
    async def rollout(self, session: Session) -> Trajectory:
        await session.generate()
        session.append([7, 8])
        await session.generate()
        return session.finish(await session.score())


def loader() -> PromptLoader:
    return PromptLoader(prompts(7), 2, seed=3, shuffle=True)


def generate_all(
    engine: GenerationEngine, requests: Sequence[GenerationRequest]
) -> Iterator[tuple[int, GeneratedSequence]]:
    """Generate outside of an event loop; yield the index of each request and its sequence, as they finish."""
    loop = asyncio.new_event_loop()
    tasks = {loop.create_task(engine.generate(request)): index for index, request in enumerate(requests)}
    try:
        loop.run_until_complete(asyncio.sleep(0))  # every task has asked
        answers = engine.answer_all() if isinstance(engine, LockstepEngine) else iter(())
        while tasks:
            next(answers, None)
            done, _ = loop.run_until_complete(asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))
            for task in sorted(done, key=lambda ended: tasks[ended]):
                yield tasks.pop(task), task.result()
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(_ended([*left, *tasks]))
        loop.close()


async def _ended(tasks: Sequence["asyncio.Task[Any]"]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
