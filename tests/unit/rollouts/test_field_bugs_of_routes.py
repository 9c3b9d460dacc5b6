# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Bugs that other frameworks had with routed experts of several turns and sequences, by the numbers of our list.

Each fails on its planted bug.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl_moe.data.continuation import Continuation
from nemo_rl_moe.distributed.batch import Destination, ModelInput
from nemo_rl_moe.distributed.stored_rows import StoredRows
from nemo_rl_moe.endpoint.chat_requests import ChatRequest
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest
from nemo_rl_moe.rollouts.agents.branches import Branches
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.growing_sequence import GrowingSequence, GrowingSequences
from nemo_rl_moe.rollouts.training_batch import training_batch
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.routing.replay import ROUTED_EXPERTS, UNKNOWN
from tests.support.conversations import ALL, Message, script_of, scripted_session
from tests.support.scripted_rollouts import red_on
from tests.unit.rollouts.dispatch.test_field_bugs_of_ends import in_place_of
from tests.unit.rollouts.test_messages import ASKED, CHATML, RIGHT, THOUGHT, USER

Patch = pytest.MonkeyPatch
THINKING = ALL["THINKING"]


def with_routes(session: Session, *more: int) -> None:
    """Have the engine report, for the routes of each token that it has read, the token and the number of the pass.

    Args:
        more: What it reports for the last token, which no pass has read.
    """
    submit, passes = script_of(session).answer, count(1)

    async def routed(request: GenerationRequest) -> GeneratedSequence:
        found = await submit(request)
        fed = [*request.token_ids, *found.token_ids.tolist()][:-1]
        rows = np.stack([np.array(fed), np.full(len(fed), next(passes))], axis=1)
        rows = np.concatenate([rows, *(np.full((1, 2), filler) for filler in more)])
        return replace(found, routed_experts=StoredRows.of(rows[:, None].astype(np.int16)))

    script_of(session).answer = routed


def routes_of(found: Trajectory) -> list[tuple[list[int], list[int]]]:
    """Return the tokens that the routes of each sequence are of, and their passes, as a rank gets them."""
    batch = training_batch([found], torch.ones(1, 1), 0, leave_out_truncated=False).fetched(list)
    column = batch.columns[ROUTED_EXPERTS]
    assert (column.values.dtype, column.goes_to) == (torch.int16, Destination.MODEL)
    rows = column.values[:, :, 0]
    assert (rows.shape[:2], len(rows)) == (batch.input_ids.shape, found.num_sequences)
    return [(row[:, 0].tolist(), row[:, 1].tolist()) for row in rows]


def keeps_the_row_of_a_token_that_no_pass_has_read(patch: Patch) -> None:
    patch.setattr(StoredRows, "before", lambda self, end: self)


@red_on(keeps_the_row_of_a_token_that_no_pass_has_read)
async def test_t12_the_last_token_of_a_turn_has_the_routes_of_the_pass_that_reads_it() -> None:
    """Also where an engine reports a row for it, -1 or experts that mean nothing (NeMo-RL#3485)."""
    for fillers in ((), (UNKNOWN,), (0,), (77,)):
        session = scripted_session(CHATML, ASKED, ["first<|im_end|>", "second<|im_end|>"])
        with_routes(session, *fillers)
        first = await session.generate()
        session.append_message(USER)
        await session.generate()
        found = session.finish(RIGHT)
        ((tokens, passes),) = routes_of(found)
        (sequence,) = found.sequences
        assert tokens == padded(sequence.token_ids[:-1].tolist(), len(sequence))
        in_first_pass = len(session.prompt.token_ids) + len(first.token_ids) - 1
        assert passes == padded([1] * in_first_pass + [2] * (len(sequence) - 1 - in_first_pass), len(sequence))


def drops_routes_of_later_turns(patch: Patch) -> None:
    patch.setattr(StoredRows, "followed_by", lambda self, later: self)


@in_place_of(GrowingSequences, "finished")
def drops_routes_of_later_sequences(right: Any, self: Any, inputs: Mapping[str, ModelInput]) -> Any:
    first, *others = right(self, inputs)
    return first, *(replace(other, routed_experts=None) for other in others)


@red_on(drops_routes_of_later_turns, drops_routes_of_later_sequences)
async def test_t14_every_way_through_a_trajectory_has_routes() -> None:
    """Of one turn, of several, and of a sequence that begins anew (rllm#756)."""
    for family, responses in ((CHATML, ["a<|im_end|>"] * 3), (THINKING, [THOUGHT, "b<|end|>", "c<|end|>"])):
        for num_turns in (1, 2, 3):
            session = scripted_session(family, ASKED, responses[:num_turns])
            with_routes(session)
            await session.generate()
            for _ in range(num_turns - 1):
                session.append_message(USER)
                await session.generate()
            found = session.finish(RIGHT)
            assert found.num_sequences == (2 if family is THINKING and num_turns > 1 else 1)
            for (tokens, _), sequence in zip(routes_of(found), found.sequences, strict=True):
                assert tokens[: len(sequence) - 1] == sequence.token_ids[:-1].tolist()


@in_place_of(GrowingSequences, "begin")
def takes_the_routes_of_the_sequence_before(right: Any, self: Any, token_ids: Sequence[int]) -> GrowingSequence:
    before = self.last
    begun: GrowingSequence = right(self, token_ids)
    begun.captured = dict(before.captured)
    return begun


def padded(values: Sequence[int], size: int) -> list[int]:
    return [*values, *[UNKNOWN] * (size - len(values))]


@red_on(takes_the_routes_of_the_sequence_before)
async def test_t13_routes_of_a_branch_are_those_of_its_own_tokens() -> None:
    """Two branches share a prefix that is shorter than the first of them (AReno#524)."""
    session = scripted_session(CHATML, ASKED, ["one<|im_end|>", "a long answer<|im_end|>", "x<|im_end|>"])
    with_routes(session)
    branches = Branches(session, Continuation(CHATML.tokenizer))

    async def ask(*messages: Message) -> Message:
        place = branches.place(ChatRequest(messages))
        sampled = await session.sample(place.token_ids)
        reply = {"role": "assistant", "content": sampled.turn.text}
        branches.add(place, reply, sampled)
        return reply

    first = await ask(*ASKED)
    await ask(*ASKED, first, {"role": "user", "content": "one way"})
    await ask(*ASKED, first, {"role": "user", "content": "2"})
    found = session.finish(RIGHT)
    longest = max(map(len, found.sequences))
    in_first_pass = len(session.prompt.token_ids) + len(CHATML.encode("one<|im_end|>")) - 1
    expected_passes = ([1] * in_first_pass + [2] * (len(found.sequences[0]) - 1 - in_first_pass), None)
    for number, ((tokens, passes), sequence) in enumerate(zip(routes_of(found), found.sequences, strict=True)):
        fed = len(sequence) - 1
        assert tokens == padded(sequence.token_ids[:-1].tolist(), longest)
        assert passes == padded(expected_passes[number] or [3] * fed, longest)


def joins_whole_passes(patch: Patch) -> None:
    patch.setattr(StoredRows, "followed_by", lambda self, later: replace(self, pieces=self.pieces + later.pieces))


@red_on(takes_the_routes_of_the_sequence_before, joins_whole_passes)
async def test_t15_a_truncated_episode_that_is_not_contiguous_has_routes_of_its_own_tokens_alone() -> None:
    """Its history changes, and what comes last does not fit: no row is of another token (NeMo-RL#3063)."""
    responses = [THOUGHT, "second<|end|>", "third<|end|>"]
    session = scripted_session(THINKING, ASKED, responses, max_tokens=150)
    with_routes(session)
    await session.generate()
    for _ in range(2):
        session.append_message(USER)
        await session.generate()
    session.append_message({"role": "user", "content": "r" * 150})
    found = session.finish(RIGHT)
    assert (found.is_truncated, found.num_sequences, session.has_room) == (True, 2, False)
    longest = max(map(len, found.sequences))
    (tokens, passes), (later_tokens, later_passes) = routes_of(found)
    first, second = found.sequences
    assert tokens == padded(first.token_ids[:-1].tolist(), longest)
    assert passes == padded([1] * (len(first) - 1), longest)
    assert later_tokens == padded(second.token_ids[:-1].tolist(), longest)
    in_second_pass = second.token_ids.tolist().index(THINKING.end_ids[0], np.flatnonzero(second.loss_mask)[0])
    assert later_passes == padded([2] * in_second_pass + [3] * (len(second) - 1 - in_second_pass), longest)
