# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Sequences of a conversation that begins anew: a fresh rendering, in which no token is trained on again."""

from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import pytest
import torch

from nemo_rl_moe.data.continuation import Continuation
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.training_batch import training_batch
from nemo_rl_moe.rollouts.trajectory import NOT_SAMPLED, Trajectory, rollout_metrics
from tests.support.conversations import ALL, LOGPROB, WEIGHT_VERSION, Message, scripted_session
from tests.unit.rollouts.test_messages import ASKED, RIGHT, THOUGHT, USER, run, texts_of

FAMILY = ALL["THINKING"]
RESULT = {"role": "tool", "content": "3"}
FRESH = "<|start|>user\nq<|end|>\n<|start|>assistant\nfirst<|end|>\n<|start|>user\nr<|end|>\n<|start|>assistant\n"


def after_responses(*answers: Sequence[Message]) -> Callable[[Session], Awaitable[Trajectory]]:
    """Messages after the first response, after the second one, and so on."""

    async def function(session: Session) -> Trajectory:
        for messages in answers:
            await session.generate()
            session.append_messages(messages)
        await session.generate()
        return session.finish(RIGHT)

    return function


def test_thinking_that_the_template_drops_begins_another_sequence() -> None:
    session = scripted_session(FAMILY, ASKED, [THOUGHT, "second<|end|>"])
    found = run(session, after_responses([USER]))
    assert found.fault is None
    asked = "<|start|>user\nq<|end|>\n<|start|>assistant\n"
    assert texts_of(FAMILY, found) == [(f"{asked}{THOUGHT}", THOUGHT), (f"{FRESH}second<|end|>", "second<|end|>")]
    for sequence in found.sequences:
        assert (sequence.weight_versions == np.where(sequence.loss_mask, WEIGHT_VERSION, NOT_SAMPLED)).all()
        assert (sequence.logprobs == np.where(sequence.loss_mask, LOGPROB, 0)).all()
    assert found.sequences[1].token_ids.tolist() == FAMILY.encode(f"{FRESH}second<|end|>")
    assert (found.num_turns, found.finish_reason, found.reward) == (2, "stop", 1.0)
    assert rollout_metrics([found])["mean_sequences_per_sample"] == 2.0
    assert session.messages == (
        *ASKED,
        {"role": "assistant", "content": THOUGHT.removesuffix("<|end|>")},
        USER,
        {"role": "assistant", "content": "second"},
    )
    batch = training_batch([found], torch.ones(1, 1), 0, leave_out_truncated=False)
    trained = [ids[mask].tolist() for ids, mask in zip(batch.input_ids, batch.token_mask, strict=True)]
    assert trained == [FAMILY.encode(THOUGHT), FAMILY.encode("second<|end|>")]


def test_one_sequence_where_rewritten_turns_are_kept() -> None:
    kept = Continuation(FAMILY.tokenizer, keep_rewritten=True)
    session = scripted_session(FAMILY, ASKED, [THOUGHT, "second<|end|>"], continuation=kept)
    ((text, trained),) = texts_of(FAMILY, run(session, after_responses([USER])))
    assert trained == f"{THOUGHT}second<|end|>"
    assert text.endswith(f"{THOUGHT}\n<|start|>user\nr<|end|>\n<|start|>assistant\nsecond<|end|>")


def test_later_turns_continue_the_new_sequence() -> None:
    session = scripted_session(FAMILY, ASKED, [THOUGHT, "b<|end|>", THOUGHT, "d<|end|>", "e<|end|>"])
    found = run(session, after_responses([RESULT], [USER], [RESULT], [USER]))
    assert [trained for _, trained in texts_of(FAMILY, found)] == [
        f"{THOUGHT}b<|end|>",
        f"{THOUGHT}d<|end|>",
        "e<|end|>",
    ]
    assert texts_of(FAMILY, found)[2][0].count("<think>") == 0, "behind the last question there was no thought"
    assert session.num_tokens == len(found.sequences[-1])


def test_messages_one_by_one_of_which_the_last_begins_anew() -> None:
    """The tokens of the first leave the sequence that ends."""

    async def one_by_one(session: Session) -> Trajectory:
        await session.generate()
        for message in (RESULT, USER, {**USER, "content": "s"}):
            session.append_message(message)
        await session.generate()
        return session.finish(RIGHT)

    responses = [THOUGHT, "second<|end|>"]
    found = run(scripted_session(FAMILY, ASKED, responses), one_by_one)
    at_once = run(scripted_session(FAMILY, ASKED, responses), after_responses([RESULT, USER, {**USER, "content": "s"}]))
    assert found.num_sequences == 2
    assert texts_of(FAMILY, found) == texts_of(FAMILY, at_once)
    assert texts_of(FAMILY, found)[0][0].endswith(THOUGHT)


def test_a_sequence_without_a_response_is_left_out() -> None:
    async def function(session: Session) -> Trajectory:
        await session.generate()
        session.append_message(USER)
        return session.finish(RIGHT)

    found = run(scripted_session(FAMILY, ASKED, [THOUGHT]), function)
    assert [trained for _, trained in texts_of(FAMILY, found)] == [THOUGHT]


@pytest.mark.parametrize("more", [0, 1])
def test_a_conversation_that_does_not_fit_into_a_sequence(more: int) -> None:
    message = {"role": "user", "content": "r" * 100}
    fresh = FRESH.replace("\nr<", f"\n{'r' * 100}<")

    async def function(session: Session) -> Trajectory:
        await session.generate()
        session.append_message(message)
        assert session.has_room == (not more)
        return session.finish(RIGHT)

    session = scripted_session(FAMILY, ASKED, [THOUGHT], max_tokens=len(FAMILY.encode(fresh)) + 1 - 2 * more)
    found = run(session, function)
    assert found.fault is None
    assert found.is_truncated == bool(more)
    if more:
        assert found.overlong.startswith(
            f"{len(FAMILY.encode(fresh))} tokens of the environment do not fit into a sequence of"
        )


def test_control_tokens_in_earlier_messages_stay_plain_text() -> None:
    messages = ({"role": "tool", "content": "<s>"}, {"role": "user", "content": "<|end|>"})
    session = scripted_session(FAMILY, ASKED, [THOUGHT, "b<|end|>", "c<|end|>"])
    found = run(session, after_responses(*([message] for message in messages)))
    _, last = found.sequences
    start, end, other = FAMILY.tokenizer.convert_tokens_to_ids(["<|start|>", "<|end|>", "<s>"])
    ids = last.token_ids.tolist()
    assert (ids.count(start), ids.count(end), ids.count(other)) == (6, 6, 0)
    assert "<s>" in FAMILY.tokenizer.decode(ids)


GPT_OSS = ALL["gpt-oss"]


def test_an_end_token_that_the_template_replaces() -> None:
    """As `<|return|>`; the model writes the header of its channel itself, which the template writes before any text."""
    sampled = "<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>final<|message|>first<|return|>"
    session = scripted_session(GPT_OSS, ASKED, [sampled, "<|channel|>final<|message|>second<|return|>"])
    found = run(session, after_responses([USER]))
    assert found.fault is None, found.fault_message
    (_, first), (text, second) = texts_of(GPT_OSS, found)
    assert (first, second) == (sampled, "<|channel|>final<|message|>second<|return|>")
    fresh = GPT_OSS.render([*ASKED, {"role": "assistant", "content": "first"}, USER], None)
    assert text == fresh + second


@pytest.mark.parametrize(
    ("responses", "messages", "problem"),
    [
        (
            ["<|channel|>commentary to=functions.add<|message|>{}<|call|>", "<|channel|>final<|message|>b<|return|>"],
            [{**RESULT, "name": "add"}, USER],
            "the chat template accepts turns with calls only as structured fields",
        ),
        (
            ["no header<|return|>"],
            [USER],
            "the chat template writes '<|channel|>final<|message|>' before a turn's text, but the model did not",
        ),
    ],
)
def test_what_cannot_be_rendered_afresh_costs_its_trajectory(
    responses: list[str], messages: list[Message], problem: str
) -> None:
    found = run(scripted_session(GPT_OSS, ASKED, responses), after_responses(*([message] for message in messages)))
    assert found.fault is Fault.ERROR
    assert found.fault_message.startswith("NoExtension: ")
    assert f"; the conversation cannot be rendered afresh either: {problem}" in found.fault_message
