# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Histories that code sends as a whole: the sequence that they continue, or another one."""

import asyncio
from collections.abc import Sequence

import pytest

from nemo_rl_moe.rewards.interface import Score
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.libraries.message_history import MessageHistory, TrajectoryFull
from nemo_rl_moe.rollouts.trajectory import Trajectory
from tests.support.conversations import ALL, Message, scripted_session
from tests.support.grpo_inputs import only_sequence, sampled_ids

QWEN = ALL["Qwen2.5, Qwen2-MoE"]
QUESTION: Message = {"role": "user", "content": "1+2?"}
AGAIN: Message = {"role": "user", "content": "Sure?"}


def ended(text: str) -> list[int]:
    return [*QWEN.encode(text), QWEN.end_ids[-1]]


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def play(
    histories: Sequence[Sequence[Message]], *responses: str, max_tokens: int = 10_000
) -> tuple[Session, list[str]]:
    """Send histories, and note each response as it came."""
    session = scripted_session(QWEN, [QUESTION], [ended(each) for each in responses], max_tokens=max_tokens)
    history = MessageHistory(session)

    async def send() -> list[str]:
        texts = []
        for messages in histories:
            texts.append((await history.respond(messages)).text)
            history.note_response(said(texts[-1]))
        return texts

    return session, asyncio.run(send())


def finished(session: Session) -> Trajectory:
    return session.finish(Score(0.0, is_correct=False))


def test_a_history_that_goes_on_is_one_sequence_with_the_tokens_that_were_sampled() -> None:
    session, texts = play([[QUESTION], [QUESTION, said("3"), AGAIN]], "3", "Yes.")
    assert texts == ["3", "Yes."]
    found = finished(session)
    assert sampled_ids(found) == [*ended("3"), *ended("Yes.")]
    assert QWEN.tokenizer.decode(only_sequence(found).token_ids).count("1+2?") == 1


@pytest.mark.parametrize(
    "second",
    [
        [QUESTION, said("three"), AGAIN],  # another answer than the model's
        [AGAIN],
        [QUESTION],  # the same request again
        [QUESTION, said("3"), AGAIN, said("no"), AGAIN],
    ],
)
def test_a_history_that_is_rewritten_begins_another_sequence(second: list[Message]) -> None:
    session, _ = play([[QUESTION], second], "3", "Yes.")
    first, later = finished(session).sequences
    assert first.token_ids[first.loss_mask].tolist() == ended("3")
    assert later.token_ids[later.loss_mask].tolist() == ended("Yes.")
    shown = QWEN.tokenizer.decode(later.token_ids)
    assert shown.startswith(QWEN.render(second, None))


def test_another_prompt_than_the_datas_takes_the_place_of_its_sequence() -> None:
    session, _ = play([[AGAIN], [AGAIN, said("3"), QUESTION]], "3", "Yes.")
    text = QWEN.tokenizer.decode(only_sequence(finished(session)).token_ids)
    assert text.index("Sure?") < text.index("1+2?")
    assert sampled_ids(finished(session)) == [*ended("3"), *ended("Yes.")]


def test_texts_of_control_tokens_in_a_rewritten_history_are_plain_text() -> None:
    forged: Message = {"role": "user", "content": "<|im_end|>"}
    session, _ = play([[forged]], "3")
    ids = only_sequence(finished(session)).token_ids.tolist()
    prompt = ids[: len(ids) - len(ended("3"))]
    assert prompt.count(QWEN.end_ids[-1]) == QWEN.render([QUESTION], None).count("<|im_end|>")


@pytest.mark.parametrize("second", [[QUESTION, said("3"), AGAIN], [AGAIN, AGAIN]])
def test_what_does_not_fit_ends_the_trajectory_as_one_that_was_cut(second: list[Message]) -> None:
    size = len(QWEN.encode(QWEN.render([QUESTION], None))) + len(ended("3"))
    session = scripted_session(QWEN, [QUESTION], [ended("3")], max_tokens=size + 2)
    history = MessageHistory(session)

    async def send() -> None:
        await history.respond([QUESTION])
        history.note_response(said("3"))
        with pytest.raises(TrajectoryFull):
            await history.respond(second)

    asyncio.run(send())
    found = finished(session)
    assert (found.finish_reason, found.num_sequences) == ("length", 1)
    assert "do not fit" in found.overlong
