# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests of one trajectory that overlap: each response is in one sequence, whatever order they come in."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from openai import APITimeoutError

from nemo_rl_moe.endpoint.chat_requests import RequestRules
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest
from nemo_rl_moe.rewards.interface import Score
from nemo_rl_moe.rollouts.agents.requests import Asked, RequestSettings, TrajectoryRequests
from nemo_rl_moe.rollouts.agents.task import AgentTask
from nemo_rl_moe.rollouts.trajectory import Trajectory
from tests.support.conversations import (
    ALL,
    MODEL,
    QUESTION,
    Answer,
    Gate,
    client_of,
    ended,
    error_of,
    play,
    scripted_session,
)
from tests.unit.rollouts.agents.test_agent_conversations import joined, sampled_of, sent, wait_for_the_server

QWEN = ALL["Qwen3, Qwen3-MoE"]
LIMIT_S = 60.0


class Meeting(Gate):
    """Holds responses back until a number of requests waits for them, after some that pass.

    Attributes:
        asked: All requests.
    """

    def __init__(self, number: int, passing: int = 0) -> None:
        super().__init__()
        self._number, self._passing = number, passing
        self.asked: list[GenerationRequest] = []

    def before(self, submit: Answer) -> Answer:
        async def meet_and_submit(request: GenerationRequest) -> GeneratedSequence:
            self.asked.append(request)
            if len(self.asked) > self._passing:
                if len(self.asked) == self._passing + self._number:
                    self.is_open.set()
                assert await asyncio.to_thread(self.is_open.wait, LIMIT_S), "the others do not come"
            return await submit(request)

        return meet_and_submit


def at_once(*calls: Callable[[], object]) -> None:
    """Call functions at the same time, and wait for their ends."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def continued(questions: Sequence[str]) -> tuple[list[str], Trajectory, dict[str, set[int]]]:
    """Play an agent that continues one response with several questions at once.

    Returns:
        Its replies, its trajectory, and the seeds of the responses to each question.
    """
    meeting, replies = Meeting(len(questions), passing=1), list[str]()

    def agent(task: AgentTask) -> float:
        client = client_of(task)
        answer = sent(client, task.messages).choices[0].message

        def ask(question: str) -> None:
            history = [*task.messages, answer, {"role": "user", "content": question}]
            replies.append(sent(client, history).choices[0].message.content)

        at_once(*(partial(ask, question) for question in questions))
        return 1.0

    responses = [ended(QWEN, word) for word in ("first", *"wxyz"[: len(questions)])]
    _, found = play(agent, responses, QWEN, gate=meeting)
    seeds: dict[str, set[int]] = {}
    for request in meeting.asked[1:]:
        question = QWEN.tokenizer.decode(request.token_ids).split("<|im_start|>user\n")[-1].partition("<")[0]
        seeds.setdefault(question, set()).add(request.seed)
    return replies, found, seeds


def test_each_response_is_in_one_sequence_and_its_seed_depends_on_its_request_alone() -> None:
    replies, found, seeds = continued("abca")
    assert sorted(replies) == ["w", "x", "y", "z"]
    assert (found.fault, found.num_turns, found.num_sequences) == (None, 5, 4)
    first, *others = (ended(QWEN, word) for word in ("first", *"wxyz"))
    assert sorted(joined(sampled_of(found))) == sorted(joined([first, *others])), "no token is trained on twice"
    assert sum(first == each[: len(first)] for each in sampled_of(found)) == 1
    assert {name: len(each) for name, each in seeds.items()} == {"a": 2, "b": 1, "c": 1}
    assert continued("caab")[2] == seeds


def test_a_client_that_leaves_ends_its_request_alone() -> None:
    meeting, replies = Meeting(3), list[str]()

    def agent(task: AgentTask) -> float:
        def stay() -> None:
            replies.append(sent(client_of(task), task.messages).choices[0].message.content)

        def leave() -> None:
            with pytest.raises(APITimeoutError):
                sent(client_of(task).with_options(timeout=0.5), [{"role": "user", "content": "left"}])
            wait_for_the_server(task)
            sent(client_of(task), [{"role": "user", "content": "last"}])

        at_once(stay, leave)
        return 1.0

    _, found = play(agent, [ended(QWEN, word) for word in ("one", "two", "three")], QWEN, gate=meeting)
    assert (found.num_turns, found.num_sequences, found.fault) == (2, 2, None)
    assert len(meeting.asked) == 3
    assert "left" not in "".join(turn.text for turn in found.conversation)


def test_requests_that_wait_for_a_response_count_as_turns() -> None:
    gate, errors = Gate(), list[Any]()

    def agent(task: AgentTask) -> float:
        def ask(text: str) -> None:
            sent(client_of(task).with_options(timeout=10.0), [{"role": "user", "content": text}])

        def ask_too_much() -> None:
            gate.is_reached.wait()
            try:
                errors.append(error_of(lambda: ask("2")))
            finally:
                gate.is_open.set()

        at_once(partial(ask, "1"), ask_too_much)
        return 1.0

    _, found = play(agent, [ended(QWEN, "one")], QWEN, gate=gate, max_turns=1)
    assert errors == [(400, "the trajectory has 1 responses, the maximum (env.driver.max_turns)", None)]
    assert (found.num_turns, found.fault) == (1, None)


class Never(Gate):
    """Lets the first response pass, and holds the others back for ever."""

    def before(self, submit: Answer) -> Answer:
        async def wait(request: GenerationRequest) -> GeneratedSequence:
            self.is_reached.set()
            return await asyncio.get_running_loop().create_future()

        answers = iter([submit, wait])
        return lambda request: next(answers)(request)


def test_an_agent_that_ends_does_not_wait_for_its_requests() -> None:
    never, errors = Never(), list[Any]()

    def agent(task: AgentTask) -> float:
        def ask() -> None:
            errors.append(error_of(lambda: sent(client_of(task), [{"role": "user", "content": "open"}])))

        sent(client_of(task), task.messages)
        asking.append(threading.Thread(target=ask))
        asking[0].start()
        never.is_reached.wait()
        return 1.0

    asking: list[threading.Thread] = []
    _, found = play(agent, [ended(QWEN, "one")], QWEN, gate=never)
    assert (found.reward, found.num_turns, found.fault) == (1.0, 1, None)
    asking[0].join()
    assert errors == [(404, "the trajectory has ended", "session_not_found")]


@pytest.mark.parametrize("order", ["abc", "cba"])
def test_requests_that_are_gathered_are_sorted_by_their_text(order: str) -> None:
    """So an engine in lockstep gets them in the same order in each run."""
    requests: list[list[int]] = []
    session = scripted_session(QWEN, [QUESTION], [ended(QWEN, word) for word in "xyz"], requests=requests)
    rules = RequestRules(MODEL, session.sampling, is_strict=True)

    async def run() -> list[Asked]:
        posted: asyncio.Queue[Callable[[], object]] = asyncio.Queue()
        settings = RequestSettings(rules, None, 9, gather_s=0.01)
        taken = TrajectoryRequests(session, settings, posted.put_nowait, lambda kind, text: None)
        asked = [Asked({"model": MODEL, "messages": [{"role": "user", "content": each}]}) for each in order]
        for each in asked:
            taken.take(each)
        for _ in range(4):
            (await posted.get())()
        assert posted.empty()
        return asked

    asked = asyncio.run(run())
    replies = {each.body["messages"][0]["content"]: each.reply.result() for each in asked}  # type: ignore[index]
    texts = {question: reply["choices"][0]["message"]["content"] for question, reply in replies.items()}
    assert texts == {"a": "x", "b": "y", "c": "z"}
    found = session.finish(Score(1.0, is_correct=True))
    assert [(turn.role, turn.text, turn.sequence) for turn in found.conversation[1::2]] == [
        ("assistant", "x", 0),
        ("assistant", "y", 1),
        ("assistant", "z", 2),
    ]
