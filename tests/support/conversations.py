# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversations under all chat templates of the tests, sessions whose model follows a script, and agents in threads."""

import asyncio
import json
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from nemo_rl_moe.data.continuation import Continuation
from nemo_rl_moe.data.corrected_templates import CORRECTED
from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.data.speech import describe_speech
from nemo_rl_moe.data.template_inputs import NO_INPUTS, TemplateInputs
from nemo_rl_moe.data.tokenizer import load_tokenizer
from nemo_rl_moe.endpoint.chat_requests import RequestRules
from nemo_rl_moe.errors import ConfigurationError, one_line
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest, SamplingParameters
from nemo_rl_moe.rewards.interface import Fault, Score, ScoringItem
from nemo_rl_moe.rollouts.agents.environment import AgentEnvironment
from nemo_rl_moe.rollouts.agents.requests import RequestSettings
from nemo_rl_moe.rollouts.agents.server import EndpointServer
from nemo_rl_moe.rollouts.agents.task import AgentTask
from nemo_rl_moe.rollouts.agents.worker import answer_of
from nemo_rl_moe.rollouts.agents.worker_pool import AgentEnd, AgentWorkers, end_of
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.running import RunningTrajectory
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.tools.detection import format_of
from tests.support.chat_templates import (
    CHANNELS,
    NEWLINE_BETWEEN_TURNS,
    PROMPT_OPENS_THINKING,
    THINKING,
    make_byte_tokenizer,
)
from tests.support.published_templates import PUBLISHED, SPECIAL_TOKENS
from tests.support.tool_templates import FAMILIES

ASSETS = Path(__file__).parents[2] / "examples/assets"
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
WORDS = ("alpha", "It is 3.", "n\u00e9e \U0001f600", '{"k": "v"}', "assistant", "<b>", "two\nlines")
Message = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """A tokenizer with a chat template.

    Attributes:
        ends: Tokens that end the model's turns.
        words: What its conversations are made of.
        shows_tools: The template shows definitions of tools.
        shows_results: It knows turns that call, and role tool.
    """

    tokenizer: PreTrainedTokenizerBase
    ends: tuple[str, ...]
    words: tuple[str, ...] = WORDS
    shows_tools: bool = True
    shows_results: bool = True

    @property
    def end_ids(self) -> tuple[int, ...]:
        return tuple(self.tokenizer.convert_tokens_to_ids(end) for end in self.ends)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Render with the generation prompt; templates differ in the form of calls that they take."""
        forms = [list(messages), [_with_text_arguments(message) for message in messages]]
        for form in forms:
            try:
                return str(
                    self.tokenizer.apply_chat_template(form, tools=tools, tokenize=False, add_generation_prompt=True)
                )
            except Exception as error:  # a template may fail in any way that Python knows
                problem = error
        raise problem


class Conversation:
    """A conversation that grows by a turn of the model and what answers it.

    Attributes:
        messages: The prompt at first, then all turns.
        new: What answered the last turn.
        text: A fresh rendering of all of it, with the generation prompt.
    """

    def __init__(self, family: Family, source: random.Random, tools: Sequence[Mapping[str, Any]] | None):
        self._family, self._source, self._tools = family, source, tools
        self.messages: list[Message] = [{"role": "user", "content": self._words()}]
        self.new: list[Message] = []
        self.text = family.render(self.messages, tools)

    def advance(self, role: str) -> str | None:
        """Add a turn and an answer from a role.

        Returns:
            What the model has to write, its end token included, for the new rendering to come about; None: no text
            does, because the template renders what was there in another way.
        """
        turn, self.new = self._question() if role == "user" else self._call()
        before = self.text
        self.messages = [*self.messages, turn, *self.new]
        self.text = self._family.render(self.messages, self._tools)
        added = self.text[len(before) :]
        places = [added.index(end) + len(end) for end in self._family.ends if end in added]
        return added[: min(places)] if self.text.startswith(before) and places else None

    def _words(self) -> str:
        return " ".join(self._source.choice(self._family.words) for _ in range(self._source.randint(1, 3)))

    def _question(self) -> tuple[Message, list[Message]]:
        return {"role": "assistant", "content": self._words()}, [{"role": "user", "content": self._words()}]

    def _call(self) -> tuple[Message, list[Message]]:
        name = "abcdefghi"
        call = {"id": name, "type": "function", "function": {"name": "add", "arguments": {"a": self._words()}}}
        result = {"role": "tool", "tool_call_id": name, "name": "add", "content": self._words()}
        return {"role": "assistant", "content": "", "tool_calls": [call]}, [result]


def _with_text_arguments(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "content": None, "tool_calls": calls}


def _families() -> dict[str, Family]:
    found = {}
    for name, family in FAMILIES.items():
        tokenizer = make_byte_tokenizer(family.template, more_special=family.special_tokens, eos_token=family.end_token)
        found[name] = Family(tokenizer, (family.end_token, *(["<|call|>"] if name == "gpt-oss" else [])))
    for (name, published), ours in zip(PUBLISHED.items(), CORRECTED, strict=True):
        begin, end, *more = SPECIAL_TOKENS[name.partition("-")[0].partition(" ")[0]]
        for kind, template in (("published", published), ("corrected", ours.text())):
            tokenizer = make_byte_tokenizer(template, more_special=(begin, end, *more), bos_token=begin, eos_token=end)
            found[f"{kind} {name}"] = Family(
                tokenizer,
                (end,),
                shows_tools=name.startswith(("Mistral", "Kimi")),
                shows_results=kind == "corrected" or not name.startswith("Kimi"),
            )
    found["THINKING"] = Family(make_byte_tokenizer(THINKING), ("<|end|>",))
    found["PROMPT_OPENS_THINKING"] = Family(make_byte_tokenizer(PROMPT_OPENS_THINKING), ("<|end|>",), shows_tools=False)
    found["NEWLINE_BETWEEN_TURNS"] = Family(
        make_byte_tokenizer(NEWLINE_BETWEEN_TURNS), ("<|end|>",), shows_tools=False, shows_results=False
    )
    found["CHANNELS"] = Family(make_byte_tokenizer(CHANNELS, more_special=["<call>"]), ("<|end|>", "<call>"))
    for name, words in (
        ("tiny_qwen3_moe", ("12+3=", "how many", "15")),
        ("tiny_internvl_moe", (" red dots ", " 7 ", " left ")),
        ("tiny_qwen3_vl_moe", (" red dots ", " 7 ", " left ")),
    ):
        tokenizer = load_tokenizer(str(ASSETS / name))
        found[name] = Family(tokenizer, ("<eos>",), words, shows_tools=False, shows_results=False)
    found["tiny_qwen3_moe_tools"] = Family(load_tokenizer(str(ASSETS / "tiny_qwen3_moe_tools")), ("<|im_end|>",))
    return found


ALL = _families()
"""By a family's name, or that of the template or folder."""


if TYPE_CHECKING:
    from openai import OpenAI

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
        return await self.answer(request)

    async def score(self, item: ScoringItem) -> Score:
        return await self.judge(item)

    async def wait_aside(self, process: Coroutine[Any, Any, Result]) -> Result:
        return await process


def script_of(session: Session) -> ScriptedTrajectory:
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


MODEL = "the-policy"
QUESTION = {"role": "user", "content": "1+2?"}
Agent = Callable[[AgentTask], object]


def client_of(task: AgentTask) -> "OpenAI":
    """Return a client as people make it; it tries nothing twice."""
    from openai import OpenAI

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
            answer = answer_of(0, self._agent(task))
        except Exception as error:
            return AgentEnd(fault=Fault.ERROR, message=one_line(error))
        return end_of(json.loads(answer)[1])


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
    gather_s: float = 0.0,
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
    thinking = describe_speech(family.tokenizer).thinking
    with EndpointServer(MODEL) as server:
        workers = cast(AgentWorkers, ThreadWorkers(agent))
        rules = RequestRules(MODEL, session.sampling, no_tools, is_strict=False)
        settings = RequestSettings(rules, tool_format, max_turns, thinking, gather_s)
        environment = AgentEnvironment(settings, server, workers, weights)
        return session, asyncio.run(environment.rollout(session))


def ended(family: Family, text: str) -> list[int]:
    return [*family.encode(text), family.end_ids[0]]


def error_of(call: Callable[[], Any]) -> tuple[int, str, str | None]:
    """Return status, message and code of the error that a client's call raises."""
    from openai import APIStatusError

    try:
        call()
    except APIStatusError as error:
        return error.status_code, str(error.body["message"]) if isinstance(error.body, dict) else "", error.code
    raise AssertionError("no error")
