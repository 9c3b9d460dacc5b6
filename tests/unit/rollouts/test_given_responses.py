# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Given responses as trajectories: they end as generation would have ended them."""

from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl_moe.data.prompts import Prompt, PromptDataset, PromptLoader
from nemo_rl_moe.data.speech import Published, describe_speech
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rollouts.given_responses import GivenResponses
from tests.support.chat_templates import CLOSED_BY_NEXT_ROLE, make_byte_tokenizer

# Behind 256 bytes, `<|start|>`, `<|end|>` and `<s>`.
END, USER = 259, 260


def given(end: tuple[int, ...], max_tokens: int) -> Any:
    prompt = Prompt("p:1", "q", (7, 8), {"response": "ab"})
    runner: Any = SimpleNamespace(
        engine=SimpleNamespace(sleep=lambda: None), encode=lambda text: [*text.encode()], max_tokens=max_tokens
    )
    report: Any = None
    rounds = PromptLoader(PromptDataset([prompt], report), 1, 0, shuffle=False)
    source = GivenResponses(runner, rounds, 1, "response", end)
    (trajectory,) = source.next(0, PhaseClock()).trained
    return trajectory


@pytest.mark.parametrize(
    ("stop_token_ids", "expected"), [((END, USER), USER), ((END,), END), ((5, END), 5), ((), None)]
)
def test_the_end_is_that_of_the_models_turns(stop_token_ids: tuple[int, ...], expected: int | None) -> None:
    tokenizer = make_byte_tokenizer(
        CLOSED_BY_NEXT_ROLE, more_special=("<|endoftext|>", "<|user|>"), eos_token="<|endoftext|>"
    )
    speech = describe_speech(tokenizer, Published({"eos_token_id": [END, USER]}, {}))
    trajectory = given(speech.end_of_response(stop_token_ids), 100)
    (sequence,) = trajectory.sequences
    end = [] if expected is None else [expected]
    assert sequence.token_ids.tolist() == [7, 8, *b"ab", *end]
    assert sequence.loss_mask.tolist() == [False, False, True, True, *[True] * len(end)]
    assert trajectory.finish_reason == "stop"


def test_a_response_without_room_for_its_end_is_truncated() -> None:
    trajectory = given((USER,), 4)
    assert trajectory.sequences[0].token_ids.tolist() == [7, 8, *b"ab"]
    assert trajectory.finish_reason == "length"
