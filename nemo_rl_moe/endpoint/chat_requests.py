# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests for chat completions. The run's sampling holds, whatever a request asks for."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemo_rl_moe.config.suggestions import did_you_mean, nearest, shortened
from nemo_rl_moe.config.tool_definitions import definition_problem
from nemo_rl_moe.data.messages import Message, content_text, parse_messages
from nemo_rl_moe.data.record_values import RecordError, json_object, kind_of, require_encodable
from nemo_rl_moe.data.template_inputs import ToolDefinition
from nemo_rl_moe.endpoint.request_error import RequestError
from nemo_rl_moe.generation.interface import SamplingParameters

_NO_MESSAGE_KEYS = ("refusal", "annotations", "audio", "function_call")
"""Keys of assistant messages that clients add and chat templates do not know."""
CHAT_PARAMETERS = ("model", "messages", "tools", "max_tokens", "max_completion_tokens", "logprobs", "return_token_ids")
WITHOUT_EFFECT = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "stream_options",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
)
"""Parameters that do not change a response."""


@dataclass(frozen=True)
class ChatRequest:
    """A request that the model can answer.

    Attributes:
        reads_calls: Whether tool calls in the response are parsed and returned as `tool_calls`.
        max_tokens: Maximum number of tokens of the response. None for the run's limit.
        wants_logprobs: Whether the reply has the log-probability of each token.
        wants_token_ids: Whether the reply has the token ids of prompt and response.
        differences: One line for each parameter that asks for other sampling than the run's, which is used.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolDefinition, ...] = ()
    reads_calls: bool = False
    max_tokens: int | None = None
    wants_logprobs: bool = False
    wants_token_ids: bool = False
    differences: tuple[str, ...] = ()


MessageKey = tuple[str, str, str]
Check = Callable[[Any], str | None]
"""Returns what is expected instead of a value, or None if the value is allowed."""


def key_of(message: Message) -> MessageKey:
    """Return a key that is equal for equal messages.

    The key of an assistant's message consists of its stripped text and its calls without their ids.
    """
    text = content_text(message["content"])
    if message["role"] != "assistant":
        return message["role"], text, json.dumps([message.get("name"), message.get("tool_call_id")])
    calls = [
        (call["function"]["name"], _decoded(call["function"]["arguments"])) for call in message.get("tool_calls", ())
    ]
    return "assistant", text.strip(), json.dumps(calls, sort_keys=True)


def _decoded(arguments: object) -> object:
    """Return arguments of a call as an object, or as text if they are no JSON. Replies have them as JSON text."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def neutral_checks(reason: str) -> dict[str, Check]:
    """Return the checks of parameters of which only the neutral value is known.

    Args:
        reason: Appended to the expectations, such as ", as training knows none".
    """
    return {
        "min_p": must_equal(0, f"no limit{reason}"),
        "min_tokens": must_equal(0, f"no limit{reason}"),
        "ignore_eos": must_equal(False, "the end of the turn"),
        "skip_special_tokens": must_equal(True, "text without special tokens"),
        "include_stop_str_in_output": must_equal(False, "text without stop strings"),
        "repetition_penalty": must_equal(1, f"no penalty{reason}"),
        "presence_penalty": must_equal(0, f"no penalty{reason}"),
        "frequency_penalty": must_equal(0, f"no penalty{reason}"),
        "logit_bias": must_equal({}, f"none{reason}"),
        "response_format": must_equal({"type": "text"}, f"free text{reason}"),
        "parallel_tool_calls": must_equal(True, "all calls of a response"),
        "tool_choice": lambda value: None if value in ("auto", "none") else f"auto or none{reason}",
        "thinking": must_equal(None, "none: chat_template_kwargs sets how prompts are rendered"),
        "verbosity": must_equal(None, "none: chat_template_kwargs sets how prompts are rendered"),
    }


def fixed_checks() -> dict[str, Check]:
    """Return the checks of parameters of the reply's form."""
    return {
        "stream": lambda value: None if isinstance(value, bool) else "true or false",
        "top_logprobs": must_equal(0, "the tokens' own log-probabilities alone"),
        "modalities": must_equal(["text"], "text alone"),
    }


class RequestRules:
    """Limits of the requests of a run.

    Args:
        sampling: The run's sampling, which requests cannot change.
        no_tools: Reason why requests cannot have tools. None if they can.
        is_strict: Whether a request that asks for other sampling is refused. If not, the run's sampling is used.
    """

    def __init__(self, model: str, sampling: SamplingParameters, no_tools: str | None = None, *, is_strict: bool):
        self.model, self._no_tools, self._is_strict = model, no_tools, is_strict
        fixed = {
            "temperature": ("policy.generation.temperature", sampling.temperature),
            "top_p": ("policy.generation.top_p", sampling.top_p),
            "top_k": ("policy.generation.top_k", -1 if sampling.top_k is None else sampling.top_k),
        }
        no_template = "none: data.chat_template_kwargs sets how prompts are rendered"
        self._always = {"n": must_equal(1, "one response to a request"), **fixed_checks()}
        self._sampling: dict[str, Check] = {
            **{name: must_equal(value, f"the run's {key}") for name, (key, value) in fixed.items()},
            **neutral_checks(", as training knows none"),
            "seed": must_equal(None, "none: the run draws the seed of each response"),
            "stop": must_equal([], "none: policy.generation.stop_strings ends responses"),
            "chat_template_kwargs": must_equal({}, no_template),
            **dict.fromkeys(("reasoning_effort", "thinking", "verbosity"), must_equal(None, no_template)),
        }

    def parse(self, body: object) -> ChatRequest:
        """Parse the body of a request.

        Raises:
            RequestError: The request is malformed, or asks for what the model cannot do. With strict rules also if it
                asks for other sampling than the run's.
        """
        given = given_parameters(body)
        differences = tuple(filter(None, (self._difference(name, value) for name, value in given.items())))
        require_model(given, self.model, "the model in training")
        return replace(chat_request(given, self._no_tools), differences=differences)

    def _difference(self, name: str, value: Any) -> str | None:
        """Return how the run's sampling differs from what a parameter asks for."""
        if name in CHAT_PARAMETERS or name in WITHOUT_EFFECT:
            return None
        check = self._always.get(name, self._sampling.get(name))
        if check is None:
            raise unknown_parameter(name, (*CHAT_PARAMETERS, *self._always, *self._sampling))
        if (expected := check(value)) is None:
            return None
        difference = f"{name}: got {shown(value)}, expected {expected}"
        if self._is_strict or name in self._always:
            raise RequestError(f"{difference}; leave it out", parameter=name)
        return difference


def given_parameters(body: object) -> dict[str, Any]:
    """Return the parameters of a body without nulls. A body that is no object raises a `RequestError`."""
    if not isinstance(body, Mapping):
        raise RequestError(f"the body is {kind_of(body)}, expected an object with the request's parameters")
    return {name: value for name, value in body.items() if value is not None}


def require_model(given: Mapping[str, Any], model: str, what: str) -> None:
    """Raise a `RequestError` if a request is for another model."""
    if (asked := given.get("model")) != model:
        message = f"model: got {shown(asked)}, expected {model!r}, {what}"
        raise RequestError(message, status=404, code="model_not_found", parameter="model")


def unknown_parameter(name: str, known: Sequence[str]) -> RequestError:
    """Return the error about a parameter that is not known."""
    nearest_known = did_you_mean(nearest(name, (*known, *WITHOUT_EFFECT)))
    return RequestError(f"{shortened(name)}: is no parameter that this endpoint knows{nearest_known}", parameter=name)


def chat_request(given: Mapping[str, Any], no_tools: str | None) -> ChatRequest:
    """Parse the parameters `CHAT_PARAMETERS` of a request.

    Args:
        no_tools: Reason why requests cannot have tools. None if they can.
    """
    tools = _tools(given.get("tools", []), no_tools)
    limits = [positive(name, given[name]) for name in ("max_tokens", "max_completion_tokens") if name in given]
    return ChatRequest(
        _messages(given.get("messages")),
        tools,
        reads_calls=bool(tools) and given.get("tool_choice") != "none",
        max_tokens=min(limits, default=None),
        wants_logprobs=given.get("logprobs") is True,
        wants_token_ids=given.get("return_token_ids") is True,
    )


def _tools(value: object, no_tools: str | None) -> tuple[ToolDefinition, ...]:
    if not isinstance(value, list):
        raise RequestError(f"tools: got {kind_of(value)}, expected a list of definitions", parameter="tools")
    if value and no_tools is not None:
        raise RequestError(f"tools: got {len(value)}, expected none: {no_tools}", parameter="tools")
    for index, definition in enumerate(value):
        if (problem := definition_problem(definition)) is not None:
            raise RequestError(f"tools[{index}]: {problem}", parameter="tools")
    names = Counter(definition["function"]["name"] for definition in value)
    if repeated := next((name for name, number in names.items() if number > 1), None):
        raise RequestError(f"tools: got {shortened(repeated)!r} twice, expected one of each", parameter="tools")
    return tuple(value)


def must_equal(allowed: object, expected: str) -> Check:
    shown = "" if isinstance(allowed, dict | list) or allowed is None else f" ({json.dumps(allowed)})"
    return lambda value: None if value == allowed else f"{expected}{shown}"


def shown(value: object) -> str:
    return shortened(json.dumps(value, default=str))


def positive(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise RequestError(f"{name}: got {shown(value)}, expected a whole number from 1 on", parameter=name)
    return value


def _messages(value: object) -> tuple[Message, ...]:
    """Parse messages. Unlike in data, assistant messages may be empty, as a model can answer nothing."""
    given = value if isinstance(value, list) else []
    sent = [_without_client_keys(each) if isinstance(each, Mapping) else each for each in given]
    silent = {index for index, each in enumerate(sent) if isinstance(each, dict) and _is_silent(each)}
    try:
        found = parse_messages(
            [{"role": "assistant", "content": "."} if index in silent else each for index, each in enumerate(sent)]
            if isinstance(value, list)
            else value,
            "messages",
            _arguments,
        )
    except RecordError as error:
        raise RequestError(str(error), parameter="messages") from None
    for index in silent:
        found[index]["content"] = ""
    for index, message in enumerate(found):
        if not isinstance(message["content"], str):
            raise RequestError(f"messages[{index}].content has images, expected text", parameter="messages")
    if found[-1]["role"] == "assistant":
        raise RequestError(
            "the last message is the assistant's, expected one that the model answers", parameter="messages"
        )
    return tuple(found)


def _without_client_keys(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key not in _NO_MESSAGE_KEYS and value is not None}


def _arguments(value: object, name: str) -> dict[str, Any] | str:
    """Return arguments of a call. A text that is no JSON of an object stays, as agents show the model its mistakes."""
    try:
        return json_object(value, name)
    except RecordError:
        if not isinstance(value, str):
            raise
        require_encodable(value, name)
        return value


def _is_silent(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "assistant" and not message.get("content") and not message.get("tool_calls")
