# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Sequences of a conversation that begins anew: a fresh rendering, in which no token is trained on again."""

from collections.abc import Awaitable, Callable

import numpy as np
import pytest
import torch

from nemo_rl_moe.data.continuation import Continuation
from nemo_rl_moe.distributed.stored_rows import StoredRows
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.training_batch import training_batch
from nemo_rl_moe.rollouts.trajectory import NOT_SAMPLED, TokenSequence, Trajectory, rollout_metrics
from tests.support.conversations import ALL, LOGPROB, WEIGHT_VERSION, Family, Message, script_of, scripted_session
from tests.unit.rollouts.test_messages import ASKED, RIGHT, USER, run

FAMILY = ALL["THINKING"]
RESULT = {"role": "tool", "content": "3"}
THOUGHT = "<think>\nt\n</think>\n\nfirst<|end|>"
FRESH = "<|start|>user\nq<|end|>\n<|start|>assistant\nfirst<|end|>\n<|start|>user\nr<|end|>\n<|start|>assistant\n"


def texts(family: Family, trajectory: Trajectory) -> list[tuple[str, str]]:
    """The text of each sequence, and of its trained tokens."""
    decode = family.tokenizer.decode
    return [(decode(each.token_ids), decode(each.token_ids[each.loss_mask])) for each in trajectory.sequences]


def answers(*messages: Message) -> Callable[[Session], Awaitable[Trajectory]]:
    async def function(session: Session) -> Trajectory:
        await session.generate()
        session.append_messages(messages)
        await session.generate()
        return session.finish(RIGHT)

    return function


def one_after_each_response(*messages: Message) -> Callable[[Session], Awaitable[Trajectory]]:
    async def function(session: Session) -> Trajectory:
        for message in messages:
            await session.generate()
            session.append_message(message)
        await session.generate()
        return session.finish(RIGHT)

    return function


def test_thinking_that_the_template_drops_begins_another_sequence() -> None:
    session = scripted_session(FAMILY, ASKED, [THOUGHT, "second<|end|>"])
    found = run(session, answers(USER))
    assert found.fault is None
    asked = "<|start|>user\nq<|end|>\n<|start|>assistant\n"
    assert texts(FAMILY, found) == [(f"{asked}{THOUGHT}", THOUGHT), (f"{FRESH}second<|end|>", "second<|end|>")]
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
    ((text, trained),) = texts(FAMILY, run(session, answers(USER)))
    assert trained == f"{THOUGHT}second<|end|>"
    assert text.endswith(f"{THOUGHT}\n<|start|>user\nr<|end|>\n<|start|>assistant\nsecond<|end|>")


def test_later_turns_continue_the_new_sequence() -> None:
    session = scripted_session(FAMILY, ASKED, [THOUGHT, "b<|end|>", THOUGHT, "d<|end|>", "e<|end|>"])
    found = run(session, one_after_each_response(RESULT, USER, RESULT, USER))
    assert [trained for _, trained in texts(FAMILY, found)] == [f"{THOUGHT}b<|end|>", f"{THOUGHT}d<|end|>", "e<|end|>"]
    assert texts(FAMILY, found)[2][0].count("<think>") == 0, "behind the last question there was no thought"
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
    at_once = run(scripted_session(FAMILY, ASKED, responses), answers(RESULT, USER, {**USER, "content": "s"}))
    assert found.num_sequences == 2
    assert texts(FAMILY, found) == texts(FAMILY, at_once)
    assert texts(FAMILY, found)[0][0].endswith(THOUGHT)


def test_a_sequence_without_a_response_is_left_out() -> None:
    async def function(session: Session) -> Trajectory:
        await session.generate()
        session.append_message(USER)
        return session.finish(RIGHT)

    found = run(scripted_session(FAMILY, ASKED, [THOUGHT]), function)
    assert [trained for _, trained in texts(FAMILY, found)] == [THOUGHT]


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
    found = run(session, one_after_each_response(*messages))
    _, last = found.sequences
    start, end, other = FAMILY.tokenizer.convert_tokens_to_ids(["<|start|>", "<|end|>", "<s>"])
    ids = last.token_ids.tolist()
    assert (ids.count(start), ids.count(end), ids.count(other)) == (6, 6, 0)
    assert "<s>" in FAMILY.tokenizer.decode(ids)


def test_routes_of_the_new_sequence_are_those_of_its_own_pass() -> None:
    session = scripted_session(FAMILY, ASKED, [THOUGHT, "second<|end|>"])
    answered, num_passes = script_of(session).answer, 0

    async def routed(request: GenerationRequest) -> GeneratedSequence:
        nonlocal num_passes
        num_passes += 1
        found = await answered(request)
        fed = len(request.token_ids) + len(found.token_ids) - 1
        routes = StoredRows.of(np.full((fed, 1, 1), num_passes, dtype=np.int16))
        return GeneratedSequence(found.token_ids, found.logprobs, False, WEIGHT_VERSION, routes)

    script_of(session).answer = routed

    def rows(sequence: TokenSequence) -> list[int]:
        assert sequence.routed_experts is not None
        return [piece.source[0].item() for piece in sequence.routed_experts.pieces]

    first, second = run(session, answers(USER)).sequences
    assert (rows(first), rows(second)) == ([1], [2])
    assert second.routed_experts is not None
    assert second.routed_experts.end == len(second) - 1


GPT_OSS = ALL["gpt-oss"]


def test_an_end_token_that_the_template_replaces() -> None:
    """As `<|return|>`; the model writes the header of its channel itself, which the template writes before any text."""
    sampled = "<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>final<|message|>first<|return|>"
    session = scripted_session(GPT_OSS, ASKED, [sampled, "<|channel|>final<|message|>second<|return|>"])
    found = run(session, answers(USER))
    assert found.fault is None, found.fault_message
    (_, first), (text, second) = texts(GPT_OSS, found)
    assert (first, second) == (sampled, "<|channel|>final<|message|>second<|return|>")
    fresh = GPT_OSS.render([*ASKED, {"role": "assistant", "content": "first"}, USER], None)
    assert text == fresh + second


@pytest.mark.parametrize(
    ("family", "prompt", "responses", "messages", "problem"),
    [
        (
            GPT_OSS,
            ASKED,
            ["<|channel|>commentary to=functions.add<|message|>{}<|call|>", "<|channel|>final<|message|>b<|return|>"],
            [{**RESULT, "name": "add"}, USER],
            "; the conversation cannot be rendered afresh either: the chat template accepts turns with calls only as"
            " structured fields",
        ),
        (
            GPT_OSS,
            ASKED,
            ["no header<|return|>"],
            [USER],
            "; the conversation cannot be rendered afresh either: the chat template writes"
            " '<|channel|>final<|message|>' before a turn's text, but the model has not",
        ),
    ],
)
def test_what_cannot_be_rendered_afresh_costs_its_trajectory(
    family: Family, prompt: list[Message], responses: list[str], messages: list[Message], problem: str
) -> None:
    found = run(scripted_session(family, prompt, responses), one_after_each_response(*messages))
    assert found.fault is Fault.ERROR
    assert found.fault_message.startswith("NoExtension: ")
    assert problem in found.fault_message
