# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests to a served model: chat completions and completions, each with its own sampling."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemo_rl_moe.config.tool_definitions import reserved_name_problem
from nemo_rl_moe.endpoint.chat_requests import (
    CHAT_PARAMETERS,
    WITHOUT_EFFECT,
    ChatRequest,
    Check,
    chat_request,
    fixed_checks,
    given_parameters,
    must_equal,
    neutral_checks,
    positive,
    require_model,
    shown,
    unknown_parameter,
)
from nemo_rl_moe.endpoint.request_error import RequestError
from nemo_rl_moe.errors import encodable
from nemo_rl_moe.generation.interface import SamplingParameters

MOST_CHOICES = 128
MOST_PROMPTS = 1024
"""Maximum number of prompts in a request for completions."""
MOST_SEQUENCES = 2048
"""Maximum number of responses to all prompts of a request."""
_MOST_STOPS, _LONGEST_STOP = 16, 256
_LEAST_TEMPERATURE = 1e-3
"""Lower temperatures count as 0, because logits divided by them could overflow."""
_LARGEST = 1_000_000
_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions."""
_SAMPLING = ("temperature", "top_p", "top_k", "seed", "stop", "n", "return_routed_experts")
_CHAT = (*CHAT_PARAMETERS, *_SAMPLING, "chat_template_kwargs", "reasoning_effort")
_COMPLETION = ("model", "prompt", "max_tokens", "logprobs", "echo", "best_of", *_SAMPLING)

Prompt = str | tuple[int, ...]


@dataclass(frozen=True)
class Sampling:
    """Sampling of a request.

    Attributes:
        parameters: Its sampling parameters. `max_new_tokens` is the limit of the request.
        num_choices: Number of responses to each prompt.
        seed: Seed of the first response. None: a random one.
        wants_routes: Whether the reply has the routed experts.
    """

    parameters: SamplingParameters
    num_choices: int
    seed: int | None
    wants_routes: bool


@dataclass(frozen=True)
class ServedChat:
    """A request for chat completions. `template_kwargs` are variables for the chat template."""

    chat: ChatRequest
    sampling: Sampling
    template_kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class ServedCompletion:
    """A request for completions.

    Attributes:
        prompts: Texts, or token ids.
        echoes: Whether the text and the log-probabilities of a choice begin with the prompt.
        wants_logprobs: Whether choices have log-probabilities.
    """

    prompts: tuple[Prompt, ...]
    sampling: Sampling
    echoes: bool
    wants_logprobs: bool


class ServedRules:
    """Parser of requests to one model.

    Args:
        defaults: Sampling if a request does not set it. `max_new_tokens` is for chat completions.
        no_tools: Reason why requests cannot have tools. None if they can.
        no_routes: Reason why replies have no routed experts. None if they have.
    """

    def __init__(self, model: str, defaults: SamplingParameters, no_tools: str | None, no_routes: str | None):
        self.model, self._defaults, self._no_tools, self._no_routes = model, defaults, no_tools, no_routes
        self._checks = {**fixed_checks(), **neutral_checks(", as the engine has none")}
        self._checks |= {
            "suffix": must_equal("", "none: a completion continues its prompt"),
            "use_beam_search": must_equal(False, "sampling alone"),
        }

    def chat(self, body: object) -> ServedChat:
        """Parse a request for chat completions."""
        given = self._checked(body, _CHAT)
        for name in ("logprobs", "return_token_ids"):
            _boolean(given, name)
        chat = chat_request(given, self._no_tools)
        sampling = self._sampling(given, chat.max_tokens or self._defaults.max_new_tokens)
        kwargs = given.get("chat_template_kwargs", {})
        if not isinstance(kwargs, dict):
            raise _wrong("chat_template_kwargs", kwargs, "an object with variables of the chat template")
        if (problem := reserved_name_problem(kwargs)) is not None:
            raise RequestError(f"chat_template_kwargs: {problem}", parameter="chat_template_kwargs")
        if (effort := given.get("reasoning_effort")) is not None:
            kwargs = {"reasoning_effort": effort, **kwargs}
        return ServedChat(chat, sampling, kwargs)

    def completion(self, body: object) -> ServedCompletion:
        """Parse a request for completions."""
        given = self._checked(body, _COMPLETION)
        echoes, limit = _boolean(given, "echo"), given.get("max_tokens", _COMPLETION_TOKENS)
        if limit != 0 or isinstance(limit, bool) or not echoes:
            limit = positive("max_tokens", limit)
        prompts = _prompts(given.get("prompt"))
        wanted = given.get("logprobs", False)
        if not isinstance(wanted, bool) and wanted not in (0, 1):
            raise _wrong("logprobs", wanted, "0 or 1: the tokens' own, and the likeliest of a prompt's tokens")
        sampling = self._sampling(given, limit)
        if given.get("best_of", sampling.num_choices) != sampling.num_choices:
            raise _wrong("best_of", given["best_of"], f"n ({sampling.num_choices}): all responses are returned")
        if (number := len(prompts) * sampling.num_choices) > MOST_SEQUENCES:
            message = f"n: got {number:,} responses to all prompts, expected at most {MOST_SEQUENCES:,}"
            raise RequestError(message, parameter="n")
        return ServedCompletion(prompts, sampling, echoes, wanted is not False)

    def _checked(self, body: object, known: Sequence[str]) -> dict[str, Any]:
        given = given_parameters(body)
        require_model(given, self.model, "the served model")
        for name, value in given.items():
            if name in known or name in WITHOUT_EFFECT:
                continue
            check: Check | None = self._checks.get(name)
            if check is None:
                raise unknown_parameter(name, (*known, *self._checks))
            if (expected := check(value)) is not None:
                raise _wrong(name, value, f"{expected}; leave it out")
        return given

    def _sampling(self, given: Mapping[str, Any], limit: int) -> Sampling:
        defaults = self._defaults
        top_k = given.get("top_k", -1 if defaults.top_k is None else defaults.top_k)
        if not isinstance(top_k, int) or isinstance(top_k, bool) or not -1 <= top_k <= _LARGEST:
            raise _wrong("top_k", top_k, f"a whole number from 1 to {_LARGEST:,}, or -1 for all tokens")
        number = positive("n", given.get("n", 1))
        if number > MOST_CHOICES:
            raise _wrong("n", number, f"at most {MOST_CHOICES}")
        seed = given.get("seed")
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or abs(seed) >= 2**63):
            raise _wrong("seed", seed, "a whole number of 64 bits")
        wants_routes = _boolean(given, "return_routed_experts")
        if wants_routes and self._no_routes is not None:
            raise _wrong("return_routed_experts", True, f"false: {self._no_routes}")
        temperature = _number(given, "temperature", defaults.temperature, 0, _LARGEST)
        parameters = replace(
            defaults,
            max_new_tokens=limit,
            temperature=temperature if temperature >= _LEAST_TEMPERATURE else 0.0,
            top_p=_number(given, "top_p", defaults.top_p, 0, 1),
            top_k=top_k if top_k > 0 else None,
            stop_strings=_stops(given.get("stop", list(defaults.stop_strings))),
        )
        if parameters.top_p == 0:
            raise _wrong("top_p", 0, "above 0 and at most 1")
        return Sampling(parameters, number, None if seed is None else seed % 2**64, wants_routes)


def _wrong(name: str, value: object, expected: str) -> RequestError:
    return RequestError(f"{name}: got {shown(value)}, expected {expected}", parameter=name)


def _boolean(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def _number(given: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = given.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise _wrong(name, value, f"a number from {least:,} to {most:,}")
    return float(value)


def _stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > _MOST_STOPS or not all(isinstance(each, str) for each in stops):
        raise _wrong("stop", value, f"a text, or a list of at most {_MOST_STOPS} texts")
    if any(len(each) > _LONGEST_STOP or encodable(each) != each for each in stops):
        raise _wrong("stop", value, f"texts of at most {_LONGEST_STOP} characters, without half of a surrogate pair")
    return tuple(each for each in stops if each)


def _prompts(value: object) -> tuple[Prompt, ...]:
    """Parse a text, token ids, or a list of either."""
    if isinstance(value, str) or _is_token_ids(value):
        value = [value]
    expected = "a text, a list of token ids, or a list of these"
    if not isinstance(value, list) or not value:
        raise _wrong("prompt", value, expected)
    if len(value) > MOST_PROMPTS:
        raise RequestError(f"prompt: got {len(value):,} prompts, expected at most {MOST_PROMPTS:,}", parameter="prompt")
    for each in value:
        if not isinstance(each, str) and not _is_token_ids(each):
            raise _wrong("prompt", each, expected)
    return tuple(each if isinstance(each, str) else tuple(each) for each in value)


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int and each >= 0 for each in value)
