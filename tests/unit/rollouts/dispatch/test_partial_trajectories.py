# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Long trajectories at steady state: each goes on in the next steps, where new weights broke it off."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest
from nemo_rl_moe.rewards.interface import Score
from nemo_rl_moe.rollouts.dispatch.accounts import wasted_tokens
from nemo_rl_moe.rollouts.dispatch.admission import Bounds
from nemo_rl_moe.rollouts.dispatch.dispatcher import Dispatcher
from nemo_rl_moe.rollouts.dispatch.gate import EngineGate
from nemo_rl_moe.rollouts.dispatch.groups import Batch, Ticket
from nemo_rl_moe.rollouts.dispatch.prompts import PromptFeed
from nemo_rl_moe.rollouts.dispatch.source import group_seeds
from nemo_rl_moe.rollouts.dispatch.staleness import make_policy
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.loops import CallersLoop
from nemo_rl_moe.rollouts.rollout_function import RolloutFunction
from nemo_rl_moe.rollouts.trajectory import Trajectory
from tests.support.grpo_fakes import SAMPLING, FakeRewardFunction, make_runner
from tests.support.grpo_inputs import only_sequence
from tests.support.scripted_rollouts import ScriptedEngine, red_on
from tests.unit.rollouts.dispatch.test_field_bugs_of_ends import in_place_of

PROMPT = (3, 4)
GROUPS_PER_STEP, NUM_GENERATIONS, MAX_STALENESS = 4, 3, 3
NUM_STEPS, WARM_UP = 60, 10
TOKEN_S, STEP_S = 0.02, 0.5


def length_of(seed: int) -> int:
    """Return the tokens of a response: lognormal, of median 30 and mean 50."""
    return 1 + int(np.random.default_rng(seed).lognormal(mean=np.log(30), sigma=1.0))


class PausedEngine(ScriptedEngine):
    """Breaks off all that runs when it is paused. The first token of a response says how long it becomes."""

    def __init__(self) -> None:
        super().__init__()
        self._paused = asyncio.Event()

    async def generate(self, request: GenerationRequest) -> GeneratedSequence:
        begun = request.token_ids[len(PROMPT) :]
        length = begun[0] if begun else length_of(request.seed)
        missing, began_s = length - len(begun), asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(missing * TOKEN_S):
                await self._paused.wait()
            missing = min(missing, int((asyncio.get_running_loop().time() - began_s) / TOKEN_S))
        except TimeoutError:
            pass
        token_ids = ([length] * (len(begun) + missing))[len(begun) :]
        return GeneratedSequence(
            np.array(token_ids, dtype=np.int64),
            np.full(missing, -0.5),
            is_truncated=False,
            weight_version=self.version,
            is_partial=len(begun) + missing < length,
        )

    async def pause(self) -> None:
        self._paused.set()

    def wake(self) -> None:
        self._paused.clear()


def sampled_versions(trajectory: Trajectory) -> np.ndarray:
    found = only_sequence(trajectory)
    return found.weight_versions[found.loss_mask]


async def one_turn(session: Session) -> Trajectory:
    turn = await session.generate()
    return session.finish(Score(float(len(turn.token_ids)), is_correct=False))


class Run:
    """A rollout worker's groups and a trainer that sleeps.

    Attributes:
        batches: What was trained on.
        dispatched: Tickets of all groups that were begun.
        wasted: Tokens in vain at the steady state.
    """

    def __init__(self) -> None:
        self.engine, self.batches, self.dispatched = PausedEngine(), list[Batch](), []
        self.wasted = 0.0
        loop = asyncio.get_running_loop()
        self._runner = make_runner(
            self.engine,
            FakeRewardFunction(),
            RolloutFunction(one_turn, "here:one_turn"),
            10**6,
            loop=CallersLoop(loop),
        )
        self._num_tokens: dict[tuple[int, int], int] = {}
        num_prompts = (NUM_STEPS + MAX_STALENESS) * GROUPS_PER_STEP
        prompts: Iterator[Prompt] = (Prompt(f"train:{number}", "", PROMPT, {}) for number in range(num_prompts))
        policy = make_policy("policy", "windowed", Bounds(GROUPS_PER_STEP, MAX_STALENESS), "wait")
        self.dispatcher = Dispatcher(self._make_group, PromptFeed(prompts, num_prompts), policy)

    async def _make_group(self, ticket: Ticket) -> list[Trajectory]:
        self.dispatched.append(ticket)
        key, seeds = (ticket.position, ticket.attempt), group_seeds(ticket, 5, GROUPS_PER_STEP, NUM_GENERATIONS)

        def count(sequence: GeneratedSequence) -> None:
            self._num_tokens[key] = self._num_tokens.get(key, 0) + len(sequence.token_ids)

        sampling = replace(SAMPLING, max_new_tokens=10**6, stop_token_ids=())
        return await self._runner.make_group(ticket.prompt, ticket.prompt.sample_id, seeds, sampling, count)

    async def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            version = self.dispatcher.version
            batch = await self.dispatcher.next_batch(version)
            assert batch is not None
            self.batches.append(batch)
            self.wasted += wasted_tokens(batch, self._num_tokens)["rollouts/wasted_tokens"]
            await asyncio.sleep(STEP_S)
            await self.dispatcher.update_pending(version + 1)
            await self._runner.pause()
            self.engine.version = version + 1
            self._runner.resume()
            self.dispatcher.updated(version + 1)

    async def end(self) -> None:
        await self.dispatcher.stop()
        await self._runner.end()


def loses_what_was_broken_off(patch: pytest.MonkeyPatch) -> None:
    """Take what there is of a response for the whole."""
    patch.setattr(EngineGate, "generate", lambda self, request: self._ask(request))


@in_place_of(EngineGate, "generate")
async def begins_again(right: Any, self: Any, request: GenerationRequest) -> GeneratedSequence:
    while (found := await self._ask(request)).is_partial:
        pass
    return found


@red_on(loses_what_was_broken_off, begins_again)
async def test_trajectories_that_were_broken_off_go_on_in_the_next_steps() -> None:
    """No token is lost or sampled twice, and what is trained on is as long as what is generated (A13, A23)."""
    run = Run()
    run.dispatcher.start()
    await run.train(WARM_UP)
    num_begun = len(run.dispatched)
    await run.train(NUM_STEPS - WARM_UP)
    await run.end()
    found = [each for batch in run.batches for group in batch.groups for each in group.group]
    for each in found:
        assert each.num_sampled_tokens == only_sequence(each).token_ids[len(PROMPT)] == each.reward
        versions = sampled_versions(each)
        assert set(np.diff(versions)) <= {0, 1}, "it goes on under the next weights"
    spans = [len(set(sampled_versions(each).tolist())) for each in found]
    assert max(spans) == MAX_STALENESS + 1
    assert np.mean(np.array(spans) > 1) > 0.3
    assert run.wasted == 0
    assert max(age.total for batch in run.batches for age in batch.staleness) <= MAX_STALENESS

    consumed = [each.num_sampled_tokens for batch in run.batches[WARM_UP:] for g in batch.groups for each in g.group]
    begun = run.dispatched[num_begun:]
    seeds = [seed for ticket in begun for seed in group_seeds(ticket, 5, GROUPS_PER_STEP, NUM_GENERATIONS)]
    generated = np.array([length_of(seed) for seed in seeds])
    assert abs(np.mean(consumed) - generated.mean()) < generated.std() / np.sqrt(len(generated))
