# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A session over a family's tokenizer whose model says what a script says."""

from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from nemo_rl_moe.data.continuation import Continuation
from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.data.template_inputs import NO_INPUTS, TemplateInputs
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest, SamplingParameters
from nemo_rl_moe.rewards.interface import Score, ScoringItem
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.running import RunningTrajectory
from tests.support.conversations import Family, Message

Result = TypeVar("Result")
WEIGHT_VERSION, LOGPROB = 4, -0.25


Answer = Callable[[GenerationRequest], Awaitable[GeneratedSequence]]


class ScriptedTrajectory(RunningTrajectory):
    """Gets its sequences and scores from functions of a test.

    Attributes:
        answer: Continues a sequence.
        judge: Scores a response.
    """

    def __init__(self, answer: Answer, judge: Callable[[ScoringItem], Awaitable[Score]]):
        self.answer, self.judge = answer, judge

    async def generate(self, request: GenerationRequest) -> GeneratedSequence:
        """Continue one sequence."""
        return await self.answer(request)

    async def score(self, item: ScoringItem) -> Score:
        """Score one response."""
        return await self.judge(item)

    async def wait_aside(self, process: Coroutine[Any, Any, Result]) -> Result:
        """Await something of the trajectory's own."""
        return await process


def script_of(session: Session) -> ScriptedTrajectory:
    """Return the functions that answer a scripted session, which a test may replace."""
    assert isinstance(session.trajectory, ScriptedTrajectory)
    return session.trajectory


def scripted_session(
    family: Family,
    messages: Sequence[Message],
    responses: Sequence[str | Sequence[int]],
    *,
    inputs: TemplateInputs = NO_INPUTS,
    continuation: Continuation | None = None,
    max_tokens: int = 10_000,
    reward: float = 0.0,
    requests: list[list[int]] | None = None,
) -> Session:
    """Return a session whose responses are given, as texts or tokens, each with its end token.

    A request gets as many tokens of the next one as it wants.

    Args:
        continuation: None: one of the family's tokenizer.
        reward: Of every response that is scored.
        requests: Gets the tokens before each response.
    """
    script: Iterator[str | Sequence[int]] = iter(responses)

    async def generate(request: GenerationRequest) -> GeneratedSequence:
        response = next(script)
        if requests is not None:
            requests.append(list(request.token_ids))
        ids = family.encode(response) if isinstance(response, str) else list(response)
        most = request.sampling.max_new_tokens
        kept = ids[:most]
        return GeneratedSequence(np.array(kept), np.full(len(kept), LOGPROB), len(ids) > most, WEIGHT_VERSION)

    async def score(item: ScoringItem) -> Score:
        return Score(reward, is_correct=reward > 0)

    prompt_ids = family.encode(family.render(messages, inputs.tools))
    return Session(
        prompt=Prompt("p:0", "", tuple(prompt_ids), {}, messages=tuple(messages), inputs=inputs),
        group_id="p:0#0",
        sampling=SamplingParameters(1000, stop_token_ids=family.end_ids),
        seed=0,
        max_tokens=max_tokens,
        trajectory=ScriptedTrajectory(generate, score),
        decode=family.tokenizer.decode,
        encode=family.encode,
        continuation=continuation or Continuation(family.tokenizer),
    )
