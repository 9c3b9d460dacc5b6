# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Random conversations under every family's template: a session's tokens are what was there, and a fresh rendering."""

import asyncio
import random
from functools import cache

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_moe.data.continuation import Continuation, NoExtension
from nemo_rl_moe.data.template_inputs import TemplateInputs
from nemo_rl_moe.rewards.interface import Score
from nemo_rl_moe.rollouts.trajectory import NOT_SAMPLED, TokenSequence
from tests.support.conversations import ALL, TOOL, Conversation
from tests.support.scripted_session import LOGPROB, WEIGHT_VERSION, scripted_session
from tests.support.trajectories import only_sequence


@cache
def continuation_of(name: str) -> Continuation:
    """One for all conversations of a family, as in a run."""
    return Continuation(ALL[name].tokenizer)


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, bool, list[str], int]:
    name = draw(st.sampled_from(sorted(ALL)))
    roles = st.sampled_from(["user", "tool"] if ALL[name].shows_results else ["user"])
    tools = draw(st.booleans()) and ALL[name].shows_tools
    return name, tools, draw(st.lists(roles, min_size=1, max_size=5)), draw(st.integers(0, 2**32))


@settings(max_examples=80, deadline=None)
@given(cases())
def test_a_session_is_a_fresh_rendering_as_long_as_the_template_only_appends(
    case: tuple[str, bool, list[str], int],
) -> None:
    name, tools, roles, seed = case
    family, definitions = ALL[name], [TOOL] if tools else None
    conversation = Conversation(family, random.Random(seed), definitions)
    responses: list[str] = []
    session = scripted_session(
        family,
        conversation.messages,
        responses,
        inputs=TemplateInputs((TOOL,) if tools else None),
        continuation=continuation_of(name),
    )

    def so_far() -> TokenSequence:
        return only_sequence(session.finish(Score(0.0, is_correct=False)))

    async def converse() -> None:
        for role in roles:
            before = so_far()
            piece = conversation.advance(role)
            responses.append(piece or f"3{family.ends[0]}")
            sampled = list((await session.generate()).token_ids)
            try:
                session.append_messages(conversation.new)
            except NoExtension:
                assert piece is None
                return
            assert piece is not None
            found, ids = so_far(), [*before.token_ids, *sampled]
            assert found.token_ids.tolist() == family.encode(conversation.text)
            assert found.token_ids[: len(ids)].tolist() == ids
            rest = len(found.token_ids) - len(ids)
            assert found.loss_mask.tolist() == [*before.loss_mask, *[True] * len(sampled), *[False] * rest]
            assert (found.weight_versions == np.where(found.loss_mask, WEIGHT_VERSION, NOT_SAMPLED)).all()
            assert (found.logprobs == np.where(found.loss_mask, LOGPROB, 0)).all()

    asyncio.run(converse())
