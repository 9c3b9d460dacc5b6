# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Agents that run in a thread of the test, over a session whose model says what a script says."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

from openai import OpenAI

from nemo_rl_moe.data.continuation import Continuation
from nemo_rl_moe.data.template_inputs import NO_INPUTS
from nemo_rl_moe.errors import ConfigurationError, one_line
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.rollouts.agents.chat_requests import RequestRules
from nemo_rl_moe.rollouts.agents.environment import AgentEnvironment
from nemo_rl_moe.rollouts.agents.server import EndpointServer
from nemo_rl_moe.rollouts.agents.task import AgentTask
from nemo_rl_moe.rollouts.agents.worker_pool import AgentEnd, AgentWorkers, end_of
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.tools.detection import format_of
from tests.support.conversations import Family
from tests.support.scripted_session import Answer, script_of, scripted_session

MODEL = "the-policy"
QUESTION = {"role": "user", "content": "1+2?"}
Agent = Callable[[AgentTask], object]


def client_of(task: AgentTask) -> OpenAI:
    """Return a client as people make it; it tries nothing twice."""
    return OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0)


class Gate:
    """Holds the model's responses back.

    Attributes:
        is_reached: A response is waited for.
        is_open: Responses come.
    """

    def __init__(self) -> None:
        self.is_reached, self.is_open = threading.Event(), threading.Event()

    def before(self, submit: Answer) -> Answer:
        async def wait_and_submit(request: GenerationRequest) -> GeneratedSequence:
            self.is_reached.set()
            await asyncio.to_thread(self.is_open.wait)
            return await submit(request)

        return wait_and_submit


class ThreadWorkers:
    """In place of `AgentWorkers`: one thread that runs an agent."""

    def __init__(self, agent: Agent):
        self._agent, self._threads = agent, ThreadPoolExecutor(1)

    def lease(self) -> "Future[ThreadWorkers]":
        future: Future[ThreadWorkers] = Future()
        future.set_result(self)
        return future

    def start(self, task: AgentTask) -> "Future[AgentEnd]":
        return self._threads.submit(self._run, task)

    def give_back(self, leased: "Future[ThreadWorkers]") -> None:
        self._threads.shutdown(wait=False)

    def _run(self, task: AgentTask) -> AgentEnd:
        try:
            result = self._agent(task)
        except Exception as error:
            return AgentEnd(fault=Fault.ERROR, message=one_line(error))
        pair = result if isinstance(result, tuple) else (result, None)
        return end_of({"result": pair[0], "is_correct": pair[1]})


def play(
    agent: Agent,
    responses: Sequence[str | Sequence[int]],
    family: Family,
    *,
    max_tokens: int = 10_000,
    max_turns: int = 20,
    reward: float = 0.0,
    requests: list[list[int]] | None = None,
    keep_rewritten: bool = False,
    weights: Mapping[str, float] | None = None,
    question: str = "1+2?",
    gate: Gate | None = None,
    record: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Session, Trajectory]:
    """Return the session and the trajectory of an agent, whose model's responses are given.

    Args:
        gate: No response comes before it is open.
        record: Of the prompt.
    """
    continuation = Continuation(family.tokenizer, keep_rewritten=keep_rewritten)
    session = scripted_session(
        family,
        [{**QUESTION, "content": question}],
        responses,
        max_tokens=max_tokens,
        reward=reward,
        requests=requests,
        continuation=continuation,
    )
    session.prompt = replace(session.prompt, record=record)
    session.reward_weights = weights
    if gate is not None:
        script_of(session).answer = gate.before(script_of(session).answer)
    try:
        tool_format = format_of(family.tokenizer, None, NO_INPUTS)
        no_tools = None
    except ConfigurationError as error:
        tool_format, no_tools = None, str(error)
    with EndpointServer(MODEL) as server:
        workers = cast(AgentWorkers, ThreadWorkers(agent))
        rules = RequestRules(MODEL, session.sampling, no_tools)
        environment = AgentEnvironment(rules, tool_format, max_turns, server, workers, weights)
        return session, asyncio.run(environment.rollout(session))


def ended(family: Family, text: str) -> list[int]:
    """Return a response with its end token."""
    return [*family.encode(text), family.end_ids[0]]


def error_of(call: Callable[[], Any]) -> tuple[int, str, str | None]:
    """Return status, message and code of the error that a client's call raises."""
    from openai import APIStatusError

    try:
        call()
    except APIStatusError as error:
        return error.status_code, str(error.body["message"]) if isinstance(error.body, dict) else "", error.code
    raise AssertionError("no error")
