# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Messages that an environment appends: the chat template's tokens around those of the model, which stay the same."""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
import torch

from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest
from nemo_rl_moe.rewards.interface import Fault, Score
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.rollout_function import RolloutFunction
from nemo_rl_moe.rollouts.training_batch import training_batch
from nemo_rl_moe.rollouts.trajectory import NOT_SAMPLED, Trajectory
from tests.support.chat_templates import THINKING, make_byte_tokenizer
from tests.support.conversations import ALL, LOGPROB, WEIGHT_VERSION, Family, Message, script_of, scripted_session
from tests.support.grpo_fakes import SAMPLING, FakeEngine, FakeRewardFunction, make_runner, prompts
from tests.support.grpo_inputs import only_sequence, sampled_ids

CHATML = ALL["Qwen2.5, Qwen2-MoE"]
ASKED: list[Message] = [{"role": "user", "content": "q"}]
USER = {"role": "user", "content": "r"}
BEHIND = "\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n"
RIGHT = Score(1.0, is_correct=True)


def run(session: Session, function: Callable[[Session], Awaitable[Trajectory]]) -> Trajectory:
    return asyncio.run(RolloutFunction(function, "here:function").rollout(session))


def text_of(session: Session, trajectory: Trajectory) -> str:
    """What stands behind the prompt."""
    return session.decode(only_sequence(trajectory).token_ids[len(session.prompt.token_ids) :].tolist())


async def asks_twice(session: Session) -> Trajectory:
    await session.generate()
    session.append_message(USER)
    await session.generate()
    return session.finish(RIGHT)


def test_tokens_of_messages_are_not_trained_on() -> None:
    session = scripted_session(CHATML, ASKED, ["first<|im_end|>", "second<|im_end|>"])
    found = run(session, asks_twice)
    assert found.fault is None
    assert text_of(session, found) == f"first<|im_end|>{BEHIND}second<|im_end|>"
    first, behind, second = (CHATML.encode(text) for text in ("first<|im_end|>", BEHIND, "second<|im_end|>"))
    sampled = np.array(
        [False] * len(session.prompt.token_ids) + [True] * len(first) + [False] * len(behind) + [True] * len(second)
    )
    assert only_sequence(found).loss_mask.tolist() == sampled.tolist()
    assert only_sequence(found).logprobs.tolist() == np.where(sampled, LOGPROB, 0.0).tolist()
    assert only_sequence(found).weight_versions.tolist() == np.where(sampled, WEIGHT_VERSION, NOT_SAMPLED).tolist()
    batch = training_batch([found], torch.ones(1, 1), 0, leave_out_truncated=False)
    assert batch.token_mask[0].tolist() == sampled.tolist()


def test_the_conversation_of_a_session() -> None:
    async def function(session: Session) -> Trajectory:
        assert list(session.messages) == ASKED
        await session.generate()
        assert session.messages[1:] == ({"role": "assistant", "content": "first"},)
        session.append_message(USER)
        assert session.messages[2:] == (USER,)
        await session.generate()
        session.append_messages([{"role": "tool", "content": "1"}, USER])
        return session.finish(RIGHT)

    session = scripted_session(CHATML, ASKED, ["first<|im_end|>", "second<|im_end|>"])
    assert run(session, function).fault is None
    assert [message["role"] for message in session.messages] == [
        "user",
        "assistant",
        "user",
        "assistant",
        "tool",
        "user",
    ]
    assert [message["content"] for message in session.messages] == ["q", "first", "r", "second", "1", "r"]


def test_t01_sampled_tokens_are_never_rendered_again() -> None:
    """The same text in other tokens than those of the tokenizer."""
    tokenizer = make_byte_tokenizer(THINKING, merges=[("h", "e"), ("l", "o")])
    family = Family(tokenizer, ("<|end|>",))
    sampled = [*(tokenizer.convert_tokens_to_ids(letter) for letter in "helo"), *family.encode("<|end|>")]
    assert family.encode("helo<|end|>") != sampled
    session = scripted_session(family, ASKED, [sampled, "b<|end|>"])
    found = run(session, asks_twice)
    size = len(session.prompt.token_ids)
    assert only_sequence(found).token_ids[size : size + len(sampled)].tolist() == sampled
    assert only_sequence(found).loss_mask[size : size + len(sampled)].all()


def test_results_one_by_one_are_the_results_at_once() -> None:
    results = [{"role": "tool", "content": text} for text in ("1", "2", "3")]

    async def one_by_one(session: Session) -> Trajectory:
        await session.generate()
        for result in results:
            session.append_message(result)
        return session.finish(RIGHT)

    async def at_once(session: Session) -> Trajectory:
        await session.generate()
        session.append_messages(results)
        return session.finish(RIGHT)

    for name in ("Qwen2.5, Qwen2-MoE", "THINKING", "tiny_qwen3_moe_tools"):
        family = ALL[name]
        sessions = [scripted_session(family, ASKED, [f"a{family.ends[0]}"]) for _ in range(2)]
        first, second = (
            run(session, function) for session, function in zip(sessions, (one_by_one, at_once), strict=True)
        )
        assert first.fault is second.fault is None
        assert only_sequence(first).token_ids.tolist() == only_sequence(second).token_ids.tolist()
        assert only_sequence(first).loss_mask.tolist() == only_sequence(second).loss_mask.tolist()
        assert sessions[0].messages == sessions[1].messages
        assert text_of(sessions[0], first).count(family.ends[0]) > 1


def test_words_that_the_environment_puts_into_an_answer_belong_to_it() -> None:
    async def function(session: Session) -> Trajectory:
        session.append_text("Well, ")
        await session.generate()
        session.append_text(" Wait,")
        await session.generate()
        session.append_message(USER)
        return session.finish(RIGHT)

    session = scripted_session(CHATML, ASKED, ["no.", "yes<|im_end|>"])
    found = run(session, function)
    assert text_of(session, found) == f"Well, no. Wait,yes<|im_end|>{BEHIND}"
    assert session.messages[1] == {"role": "assistant", "content": "Well, no. Wait,yes"}
    assert session.decode(sampled_ids(found)) == "no.yes<|im_end|>"


def test_a_response_that_was_cut_gets_its_end_which_is_not_trained_on() -> None:
    session = scripted_session(CHATML, ASKED, ["fir", "second<|im_end|>"])
    found = run(session, asks_twice)
    assert text_of(session, found) == f"fir<|im_end|>{BEHIND}second<|im_end|>"
    assert session.decode(sampled_ids(found)) == "firsecond<|im_end|>"


@pytest.mark.parametrize("more", [0, 1])
def test_t06_a_message_that_does_not_fit_ends_the_trajectory(more: int) -> None:
    """One that fills the room to the last token fits."""
    sizes = len(CHATML.encode(f"first<|im_end|>{BEHIND}"))
    session = scripted_session(CHATML, ASKED, ["first<|im_end|>"], max_tokens=0)
    session.max_tokens = len(session.prompt.token_ids) + sizes - more

    async def function(session: Session) -> Trajectory:
        await session.generate()
        session.append_message(USER)
        assert not session.has_room
        return session.finish(RIGHT)

    found = run(session, function)
    assert found.fault is None
    assert (found.num_tokens == session.max_tokens) == (not more)
    assert found.is_truncated == bool(more)
    assert bool(found.overlong) == bool(more)
    assert len(session.messages) == 3 - more


FAULTS: list[tuple[Message, str]] = [
    (
        {"role": "tol", "content": "r"},
        "messages[0].role is 'tol', expected system, developer, user, assistant, tool; did",
    ),
    ({"role": "assistant", "content": "r"}, "messages[0].role is 'assistant', expected tool, user, system, developer"),
    ({"role": "user"}, "messages[0] has no content"),
    (
        {"role": "user", "content": [{"type": "image", "image": "a.png"}]},
        "messages[0].content has images, expected text",
    ),
]


@pytest.mark.parametrize(("message", "problem"), FAULTS)
def test_a_bad_message_costs_its_trajectory(message: Message, problem: str) -> None:
    async def function(session: Session) -> Trajectory:
        await session.generate()
        session.append_message(message)
        raise AssertionError("not reached")

    found = run(scripted_session(CHATML, ASKED, ["a<|im_end|>"]), function)
    assert found.fault is Fault.ERROR
    assert problem in found.fault_message
    assert "\n" not in found.fault_message


def test_a_template_that_refuses_a_message_costs_its_trajectory_alone() -> None:
    """The others of the run go on."""
    loop = "{%- for m in messages %}"
    strict = THINKING.replace(
        loop, f"{loop}{{%- if m.role == 'developer' %}}{{{{- raise_exception('none') }}}}{{% endif %}}"
    )
    family = Family(make_byte_tokenizer(strict), ("<|end|>",))

    async def function(session: Session) -> Trajectory:
        await session.generate()
        session.append_message({"role": "developer", "content": "r"})
        return session.finish(RIGHT)

    found = run(scripted_session(family, ASKED, ["a<|end|>"]), function)
    assert found.fault is Fault.ERROR
    expected = "Refusal: the chat template refuses the conversation: none (test_messages.py:"
    assert found.fault_message.startswith(expected)


def test_a_message_before_the_first_response() -> None:
    session = scripted_session(CHATML, ASKED, [])
    with pytest.raises(RuntimeError, match=r"before a response of the model; await session\.generate\(\) first$"):
        session.append_message(USER)


def test_a_message_while_a_response_is_waited_for() -> None:
    async def function(session: Session) -> Trajectory:
        response = asyncio.create_task(session.generate())
        await asyncio.sleep(0)
        session.append_message(USER)
        await response
        return session.finish(RIGHT)

    session = scripted_session(CHATML, ASKED, ["a<|im_end|>"])
    answered = script_of(session).answer

    async def slowly(request: GenerationRequest) -> GeneratedSequence:
        await asyncio.sleep(0)
        return await answered(request)

    script_of(session).answer = slowly
    assert run(session, function).fault_message.startswith(
        "RuntimeError: a message was added while a response was still waited for"
    )


def test_a_run_without_a_chat_template() -> None:
    worker = make_runner(FakeEngine(), FakeRewardFunction(), RolloutFunction(asks_twice, "here:asks_twice"))
    (found,) = worker.evaluate(prompts(1), 1, SAMPLING, (3, 1))
    assert found.fault_message.startswith(
        "RuntimeError: messages need a tokenizer with a chat template; set policy.tokenizer.chat_template"
    )
