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
from nemo_rl_moe.rollouts.trajectory import NOT_SAMPLED
from tests.support.conversations import ALL, LOGPROB, TOOL, WEIGHT_VERSION, Conversation, scripted_session
from tests.support.quick_list import examples


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


@settings(max_examples=examples(30), deadline=None)
@given(cases())
def test_a_session_is_a_fresh_rendering_as_long_as_the_template_only_appends(
    case: tuple[str, bool, list[str], int],
) -> None:
    name, tools, roles, seed = case
    family, definitions = ALL[name], [TOOL] if tools else None
    conversation = Conversation(family, random.Random(seed), definitions)
    responses: list[str] = []
    requests: list[list[int]] = []
    session = scripted_session(
        family,
        conversation.messages,
        responses,
        inputs=TemplateInputs((TOOL,) if tools else None),
        continuation=continuation_of(name),
        requests=requests,
    )

    async def converse() -> list[str]:
        """Return the responses, as many as one sequence has."""
        for role in roles:
            piece = conversation.advance(role)
            responses.append(piece or f"3{family.ends[0]}")
            await session.generate()
            try:
                session.append_messages(conversation.new)
            except NoExtension:
                assert piece is None, "what only appends is continued"
                return responses
            if piece is None:
                responses.append("3")
                await session.generate()
                fresh = family.encode(family.render(session.messages[:-1], definitions))
                assert requests[-1] == fresh, "another sequence begins with a fresh rendering"
                return responses[:-1]
            assert session.num_tokens == len(family.encode(conversation.text))
        responses.append("3")
        await session.generate()
        assert requests[-1] == family.encode(conversation.text)
        return responses

    in_first = asyncio.run(converse())
    first, *later = session.finish(Score(0.0, is_correct=False)).sequences
    assert len(later) == len(responses) - len(in_first)
    # What was there stays: each request begins with the one before and its response.
    for before, response, request in zip(requests, in_first, requests[1 : len(in_first)], strict=False):
        sampled = family.encode(response)
        assert request[: len(before) + len(sampled)] == [*before, *sampled]
    for sequence, sampled_texts in zip((first, *later), (in_first, responses[len(in_first) :]), strict=False):
        sampled_ids = [token_id for text in sampled_texts for token_id in family.encode(text)]
        assert sequence.token_ids[sequence.loss_mask].tolist() == sampled_ids, "each token is trained on once"
        assert (sequence.weight_versions == np.where(sequence.loss_mask, WEIGHT_VERSION, NOT_SAMPLED)).all()
        assert (sequence.logprobs == np.where(sequence.loss_mask, LOGPROB, 0)).all()
