# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Parameters of requests to a served model, and the errors about them."""

from typing import Any

import pytest

from nemo_rl_moe.endpoint.request_error import RequestError
from nemo_rl_moe.generation.interface import SamplingParameters
from nemo_rl_moe.serving.requests import ServedRules

DEFAULTS = SamplingParameters(512, temperature=1.0, stop_token_ids=(2,))
RULES = ServedRules("m", DEFAULTS, None, None)
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "1+2?"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "1+2="}


def test_a_request_has_its_own_sampling() -> None:
    plain = RULES.chat(CHAT)
    assert plain.sampling.parameters == DEFAULTS
    assert (plain.sampling.num_choices, plain.sampling.seed, plain.sampling.wants_routes) == (1, None, False)
    more = {"temperature": 0, "top_p": 0.5, "top_k": 7, "seed": -1, "n": 3, "stop": "a", "max_completion_tokens": 9}
    asked = RULES.chat({**CHAT, **more, "return_routed_experts": True, "reasoning_effort": "low"})
    assert asked.sampling.parameters == SamplingParameters(
        9, temperature=0.0, top_k=7, top_p=0.5, stop_token_ids=(2,), stop_strings=("a",)
    )
    assert (asked.sampling.num_choices, asked.sampling.seed, asked.sampling.wants_routes) == (3, 2**64 - 1, True)
    assert asked.template_kwargs == {"reasoning_effort": "low"}
    assert RULES.chat({**CHAT, "temperature": 1e-40}).sampling.parameters.temperature == 0
    # Clients send these without meaning anything by them.
    neutral = {"top_k": -1, "min_p": 0, "presence_penalty": 0.0, "logit_bias": {}, "user": "x", "seed": None}
    assert RULES.chat({**CHAT, **neutral}).sampling.parameters == DEFAULTS


def test_a_completion_takes_texts_and_token_ids() -> None:
    assert RULES.completion(TEXT).prompts == ("1+2=",)
    assert RULES.completion(TEXT).sampling.parameters.max_new_tokens == 16
    assert RULES.completion({**TEXT, "prompt": [5, 6]}).prompts == ((5, 6),)
    assert RULES.completion({**TEXT, "prompt": ["a", [5]]}).prompts == ("a", (5,))
    # As lm-eval asks for log-likelihoods.
    asked = RULES.completion({**TEXT, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234})
    assert (asked.echoes, asked.wants_logprobs) == (True, True)
    assert RULES.completion({**TEXT, "logprobs": 0}).wants_logprobs
    assert not RULES.completion({**TEXT, "logprobs": False}).wants_logprobs
    assert RULES.completion({**TEXT, "echo": True, "max_tokens": 0}).sampling.parameters.max_new_tokens == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"temperature": -1}, "temperature: got -1, expected a number from 0"),
        ({"temperature": "hot"}, 'temperature: got "hot", expected a number from 0'),
        ({"temperature": float("inf")}, "temperature: got Infinity"),
        ({"temperature": 10**400}, "temperature: got 1000"),
        ({"top_k": 10**30}, "top_k: got 1000"),
        ({"max_tokens": 10**4000}, "max_tokens: got 1000"),
        ({"stop": ["\ud800"]}, 'stop: got ["\\ud800"], expected texts of at most 256 characters'),
        ({"stop": "a" * 257}, "stop: got"),
        ({"top_p": 0}, "top_p: got 0, expected above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p: got 1.5, expected a number from 0 to 1"),
        ({"top_k": 1.5}, "top_k: got 1.5, expected a whole number from 1 to 1,000,000, or -1"),
        ({"n": 0}, "n: got 0, expected a whole number from 1 on"),
        ({"n": 1000}, "n: got 1000, expected at most 128"),
        ({"seed": 2**64}, "seed: got"),
        ({"seed": True}, "seed: got true, expected a whole number of 64 bits"),
        ({"stop": 5}, "stop: got 5, expected a text, or a list of at most 16 texts"),
        ({"presence_penalty": 0.5}, "presence_penalty: got 0.5, expected no penalty, as the engine has none (0)"),
        ({"response_format": {"type": "json_object"}}, "response_format: got"),
        ({"max_tokens": 0}, "max_tokens: got 0, expected a whole number from 1 on"),
        ({"return_routed_experts": 1}, "return_routed_experts: got 1, expected true or false"),
        ({"tempature": 1}, "tempature: is no parameter that this endpoint knows; did you mean temperature?"),
        ({"model": "n"}, "model: got \"n\", expected 'm', the served model"),
    ],
)
def test_wrong_parameters_are_named(more: dict[str, Any], message: str) -> None:
    for parse, body in ((RULES.chat, CHAT), (RULES.completion, TEXT)):
        with pytest.raises(RequestError) as caught:
            parse({**body, **more})
        assert str(caught.value).startswith(message)
        assert caught.value.parameter == next(iter(more))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"prompt": ""}, None),
        ({"prompt": []}, "prompt: got [], expected a text, a list of token ids, or a list of these"),
        ({"prompt": [1, "a"]}, "prompt: got 1, expected"),
        ({"prompt": [-1]}, "prompt: got -1, expected"),
        ({"prompt": ["a"] * 2000}, "prompt: got 2,000 prompts, expected at most 1,024"),
        ({"logprobs": 5}, "logprobs: got 5, expected 0 or 1"),
        ({"best_of": 3}, "best_of: got 3, expected n (1)"),
        ({"suffix": "x"}, 'suffix: got "x", expected none'),
        ({"messages": []}, "messages: is no parameter"),
        ({"echo": 1}, "echo: got 1, expected true or false"),
        ({"prompt": ["a"] * 1000, "n": 3}, "n: got 3,000 responses to all prompts, expected at most 2,048"),
    ],
)
def test_wrong_completions_are_named(more: dict[str, Any], message: str | None) -> None:
    if message is None:
        RULES.completion({**TEXT, **more})
        return
    with pytest.raises(RequestError) as caught:
        RULES.completion({**TEXT, **more})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"logprobs": "yes"}, 'logprobs: got "yes", expected true or false'),
        ({"return_token_ids": 1}, "return_token_ids: got 1, expected true or false"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs: the run itself sets messages"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs: got [], expected an object"),
    ],
)
def test_wrong_chats_are_named(more: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        RULES.chat({**CHAT, **more})
    assert str(caught.value).startswith(message)


def test_routes_and_tools_that_there_are_not_are_refused_with_the_reason() -> None:
    rules = ServedRules("m", DEFAULTS, "no template", "none captured")
    with pytest.raises(RequestError, match="return_routed_experts: got true, expected false: none captured"):
        rules.completion({**TEXT, "return_routed_experts": True})
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    with pytest.raises(RequestError, match="tools: got 1, expected none: no template"):
        rules.chat({**CHAT, "tools": [tool]})
