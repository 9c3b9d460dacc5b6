# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What a trajectory says of itself: its turns, in which tokens they stand, its calls, and its times."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import numpy as np

from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.data.template_inputs import NO_INPUTS
from nemo_rl_moe.data.turn_glue import NoExtension
from nemo_rl_moe.rewards.interface import Fault, Score
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.growing_sequence import GrowingSequence
from nemo_rl_moe.rollouts.rollout_function import RolloutFunction
from nemo_rl_moe.rollouts.tool_environment import ToolConversation
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.rollouts.transcript import Transcript
from nemo_rl_moe.runs.folder.conversations import ConversationTurn, ToolUse, conversation_json, conversation_of
from nemo_rl_moe.tools.detection import format_of
from nemo_rl_moe.tools.results import ToolResult, as_text
from tests.support.conversations import ALL, Family, scripted_session
from tests.support.grpo_inputs import tools_section
from tests.unit.rollouts.test_tool_environment import INPUTS, TOOLS, called, ended

DRIVER = tools_section(tools=["calculator"])
QWEN, THINKING = ALL["Qwen3, Qwen3-MoE"], ALL["THINKING"]
QUESTION = {"role": "user", "content": "1+2?"}
RIGHT = Score(1.0, is_correct=True)


async def answer(name: str, arguments: Mapping[str, object], limit_s: float) -> ToolResult:
    if arguments.get("text") == "fail":
        return ToolResult("error: it raised", Fault.ERROR, seconds=0.25)
    return ToolResult(as_text(TOOLS[name].function(**arguments)), seconds=0.5)


def session_of(responses: Sequence[str], max_tokens: int = 10_000) -> Session:
    script = [ended(QWEN, response) for response in responses]
    return scripted_session(QWEN, [QUESTION], script, inputs=INPUTS, max_tokens=max_tokens, reward=1.0)


def play(session: Session) -> Trajectory:
    tool_format = format_of(QWEN.tokenizer, None, NO_INPUTS)
    return asyncio.run(
        ToolConversation(TOOLS, tool_format, lambda record: nullcontext(answer), DRIVER, print).rollout(session)
    )


def said(found: Trajectory) -> list[tuple[str, str]]:
    return [(turn.role, turn.text) for turn in found.conversation]


def text_at(family: Family, found: Trajectory, turn: ConversationTurn) -> str:
    assert turn.sequence is not None
    start, end = turn.tokens
    text: str = family.tokenizer.decode(found.sequences[turn.sequence].token_ids[start:end])
    return text


def assert_trained_where_sampled(found: Trajectory) -> None:
    """Assert that the tokens of the model's turns are those that are trained on, and no others."""
    for index, sequence in enumerate(found.sequences):
        mask = np.zeros(len(sequence), np.bool_)
        for turn in found.conversation:
            if turn.is_sampled and turn.sequence == index:
                mask[slice(*turn.tokens)] = True
        np.testing.assert_array_equal(mask, sequence.loss_mask)


def test_a_conversation_with_tools_says_who_said_what_in_which_tokens() -> None:
    calls = called("add", a=1, b=2) + called("say", text="fail") + called("ad", a=1) + "<tool_call>{</tool_call>"
    found = play(session_of([calls, "Three."]))
    roles = [turn.role for turn in found.conversation]
    assert roles == ["user", "assistant", "tool", "tool", "tool", "tool", "assistant"]
    assert said(found)[:3] == [("user", "1+2?"), ("assistant", calls), ("tool", "3")]
    assert said(found)[-1] == ("assistant", "Three.")
    asked, made, result, *_, last = found.conversation
    assert asked.text in text_at(QWEN, found, asked)
    assert text_at(QWEN, found, made) == f"{calls}<|im_end|>"
    assert "<tool_response>" in text_at(QWEN, found, result)
    assert text_at(QWEN, found, last) == "Three.<|im_end|>"
    assert [(call.name, call.arguments, call.outcome) for call in made.calls] == [
        ("add", '{"a": 1, "b": 2}', "ok"),
        ("say", '{"text": "fail"}', "error"),
        ("ad", '{"a": 1}', "wrong"),
        ("", "", "wrong"),
    ]
    assert [call.call_id for call in made.calls] == [turn.call_id for turn in found.conversation[2:6]]
    assert result.name == "add"
    assert_trained_where_sampled(found)
    assert conversation_of(json.loads(json.dumps(conversation_json(found.conversation)))) == list(found.conversation)


def test_the_time_of_responses_and_calls_is_told_and_the_rest_is_waiting() -> None:
    now = [0.0]
    sequence = GrowingSequence((1, 2))
    transcript = Transcript(Prompt("p", "question", (1, 2), {}), sequence, str, clock=lambda: now[0])
    asked_s = transcript.now_s()
    now[0] = 5.0
    transcript.add_response("calls", sequence, 2, asked_s, waited_s=2.0)
    now[0] = 7.0
    transcript.add_call(ToolUse("1", "add", "{}"), seconds=0.5)
    transcript.add_call(ToolUse("2", "add", "{}", "wrong"), seconds=0.0)
    now[0] = 10.0
    times = transcript.times()
    assert (times.seconds, times.generation, times.tools) == (10.0, ((2.0, 5.0),), ((6.5, 7.0), (7.0, 7.0)))
    assert (times.generation_s, times.tools_s, times.waiting_s) == (3.0, 0.5, 6.5)
    prompt, response = transcript.conversation([sequence])
    assert prompt == ConversationTurn("prompt", "question", 0, (0, 2))
    assert [call.outcome for call in response.calls] == ["ok", "wrong"]


def test_a_result_that_does_not_fit_is_shown_as_not_read() -> None:
    whole = play(session_of([called("say", text="y" * 400), "done"]))
    size = len(whole.sequences[0])
    found = play(session_of([called("say", text="y" * 400), "done"], max_tokens=size - 400))
    last = found.conversation[-1]
    assert (last.role, last.text, last.sequence) == ("tool", "y" * 400, None)
    assert_trained_where_sampled(found)


def test_a_trajectory_that_fails_keeps_its_metrics_and_its_conversation() -> None:
    session = session_of([called("add", a=1, b=2) * 2, "done"])

    def refuse(messages: object) -> None:
        raise NoExtension("the template cannot go on")

    session._conversation.answer = refuse  # type: ignore[method-assign, assignment]
    found = play(session)
    assert (found.fault, found.metrics["tools/calls"], found.metrics["tools/seconds"]) == (Fault.ERROR, 2.0, 1.0)
    assert [turn.sequence for turn in found.conversation] == [0, 0, None, None]
    assert said(found)[-1] == ("tool", "3")

    async def ends_late(session: Session) -> Trajectory:
        session.metrics["searches"] = 3.0
        await session.generate()
        raise TimeoutError("too late")

    found = asyncio.run(RolloutFunction(ends_late, "here:ends_late").rollout(session_of(["a"])))
    assert (found.fault, found.metrics) == (Fault.ERROR, {"searches": 3.0})
    assert said(found) == [("user", "1+2?"), ("assistant", "a")]


def test_a_conversation_that_begins_anew_says_in_which_sequence_each_turn_stands() -> None:
    thought = "<think>\nt\n</think>\n\nfirst<|end|>"

    async def ask_again(session: Session) -> Trajectory:
        await session.generate()
        session.append_message({"role": "user", "content": "r"})
        if session.turns[0].text.startswith("<think>") and len(session.turns) == 1:
            await session.generate()
        return session.finish(RIGHT)

    found = asyncio.run(ask_again(scripted_session(THINKING, [QUESTION], [thought, "second<|end|>"])))
    assert [turn.sequence for turn in found.conversation] == [0, 0, 1, 1]
    assert text_at(THINKING, found, found.conversation[2]).startswith("<|start|>user\n1+2?")
    assert_trained_where_sampled(found)

    async def ask_in_vain(session: Session) -> Trajectory:
        await session.generate()
        session.append_message({"role": "user", "content": "r"})
        return session.finish(RIGHT)

    found = asyncio.run(ask_in_vain(scripted_session(THINKING, [QUESTION], [thought])))
    assert [turn.sequence for turn in found.conversation] == [0, 0, None]


def test_text_of_the_environment_is_no_message() -> None:
    async def begin_answer(session: Session) -> Trajectory:
        session.append_text("The answer: ")
        await session.generate()
        session.append(QWEN.encode("and?"))
        return session.finish(RIGHT)

    found = asyncio.run(begin_answer(session_of(["3"])))
    assert said(found)[1:] == [("environment", "The answer: "), ("assistant", "3"), ("environment", "and?")]
    assert [text_at(QWEN, found, turn) for turn in found.conversation[1::2]] == ["The answer: ", "and?"]
    assert_trained_where_sampled(found)


def test_sequences_that_an_agent_begins_are_told_by_their_messages() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    other = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "user", "content": "again"}]
    result = {"role": "tool", "tool_call_id": "1", "content": "result"}

    async def branch(session: Session) -> Trajectory:
        async def go_on(sequence: GrowingSequence) -> None:
            session.add_sampled(sequence, await session.sample(sequence.token_ids))

        first = session.begin_sequence(QWEN.encode("first question"), [QUESTION])
        await go_on(first)
        await go_on(session.begin_sequence(QWEN.encode("other question"), other))
        session.extend_sequence(first, QWEN.encode("a result"), [result])
        await go_on(first)
        first.add_given(QWEN.encode("no message"))
        await go_on(first)
        return session.finish(RIGHT)

    found = asyncio.run(branch(session_of(["a", "b", "c", "d"])))
    assert [(turn.role, turn.text, turn.sequence) for turn in found.conversation] == [
        ("user", "1+2?", 0),
        ("assistant", "a", 0),
        ("assistant", '\nadd {"a": 1}', 1),
        ("user", "again", 1),
        ("assistant", "b", 1),
        ("tool", "result", 0),
        ("assistant", "c", 0),
        ("environment", "no message", 0),
        ("assistant", "d", 0),
    ]
    texts = [text_at(QWEN, found, found.conversation[index]) for index in (0, 3, 5)]
    assert texts == ["first question", "other question", "a result"]
    assert not found.conversation[2].is_sampled
    assert not found.conversation[2].calls, "nobody has made it"
    assert_trained_where_sampled(found)


def test_a_conversation_of_its_own_is_told_by_its_messages() -> None:
    async def rewrite(session: Session) -> Trajectory:
        await session.generate()
        session.begin_conversation([{"role": "user", "content": "in short: 1+2?"}])
        await session.generate()
        return session.finish(RIGHT)

    found = asyncio.run(rewrite(session_of(["a", "b"])))
    assert said(found) == [("user", "1+2?"), ("assistant", "a"), ("user", "in short: 1+2?"), ("assistant", "b")]
    assert [turn.sequence for turn in found.conversation] == [0, 0, 1, 1]
    assert_trained_where_sampled(found)
