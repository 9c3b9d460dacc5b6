# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Messages of a conversation: roles, content as a text or in parts, tool calls and their results."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from nemo_rl_moe.config.suggestions import did_you_mean, nearest, shortened

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_NAMES = 20
TEXT_PART = "text"
CALL = "function_call"
SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    CALL: "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""Role of each value that `from` may have in a message of the form of ShareGPT, `{"from": ..., "value": ...}`."""
_CONTENT_FORM = "expected a string, or a list of parts of type text"

Message = dict[str, Any]


class RecordError(ValueError):
    """A record cannot be used; the message is the reason, without the place."""


def parse_turns(value: object, name: str, role: str) -> list[Message]:
    """Parses a text or a list of messages into messages.

    Args:
        value: The record's value.
        name: Its key, for error messages.
        role: Role of the turn that a text becomes.

    Raises:
        RecordError: It cannot be used.
    """
    if isinstance(value, str):
        if not value:
            raise RecordError(f"{name} is empty")
        require_encodable(value, name)
        return [{"role": role, "content": value}]
    if not is_list(value):
        raise RecordError(f"{name} is {kind_of(value)}, expected a string or a list of messages")
    return parse_messages(value, name)


def parse_messages(value: object, name: str) -> list[Message]:
    """Parses a list of messages; their content becomes one text, and arguments of tool calls become objects.

    Raises:
        RecordError: It cannot be used.
    """
    if not is_list(value):
        raise RecordError(f"{name} is {kind_of(value)}, expected a list of objects with role and content")
    if not value:
        raise RecordError(f"{name} is empty")
    return [_message(item, f"{name}[{index}]") for index, item in enumerate(value)]


def text_of(messages: Sequence[Message]) -> str:
    """Contents of messages, joined by blank lines; a turn that only calls tools has none."""
    return "\n\n".join(message["content"] for message in messages if message["content"])


def _message(value: object, name: str) -> Message:
    if not isinstance(value, Mapping):
        raise RecordError(f"{name} is {kind_of(value)}, expected an object with role and content")
    message: Message = without_nulls(value)
    said = "content"
    if "from" in message and "role" not in message:
        message, said = _from_sharegpt(message, name), "value"
    role = message.get("role")
    if role is None:
        raise RecordError(f"{name}.role is null, expected a string" if "role" in value else f"{name} has no role")
    if not isinstance(role, str):
        raise RecordError(f"{name}.role is {kind_of(role)}, expected a string")
    if role not in ROLES:
        raise RecordError(f"{name}.role is {role!r}, expected {', '.join(ROLES)}{did_you_mean(nearest(role, ROLES))}")
    calls = _tool_calls(message.pop("tool_calls", []), f"{name}.tool_calls")
    if calls and role != "assistant":
        raise RecordError(
            f"{name}.tool_calls stand in a turn of role {role}, expected assistant: the model calls tools"
        )
    if "content" in message:
        message["content"] = _content(message["content"], f"{name}.{said}")
    elif calls:
        message["content"] = ""
    else:
        missing = f"{name}.{said} is null, {_CONTENT_FORM}" if said in value else f"{name} has no {said}"
        raise RecordError(missing + (", and no tool_calls" if role == "assistant" else ""))
    if role == "assistant" and not message["content"] and not calls:
        raise RecordError(f"{name}.{said} is empty: an assistant turn needs text or tool_calls to train on")
    return {**message, "tool_calls": calls} if calls else message


def _from_sharegpt(message: Message, name: str) -> Message:
    """The message with role and content, or with `tool_calls` where it is a call; what else it has stays."""
    message = dict(message)
    speaker = message.pop("from")
    if not isinstance(speaker, str):
        raise RecordError(f"{name}.from is {kind_of(speaker)}, expected a string")
    if speaker not in SPEAKERS:
        hint = did_you_mean(nearest(speaker, SPEAKERS))
        raise RecordError(f"{name}.from is {speaker!r}, expected {', '.join(SPEAKERS)}{hint}")
    message["role"] = SPEAKERS[speaker]
    if "value" in message:
        value = message.pop("value")
        if speaker == CALL:
            calls = decoded_json(value, f"{name}.value")
            message["tool_calls"] = [{"function": call} for call in (calls if is_list(calls) else [calls])]
        else:
            message["content"] = value
    return message


def _content(value: object, name: str) -> str:
    """Text of a content; that of parts is joined as it is, with nothing in between."""
    if isinstance(value, str):
        require_encodable(value, name)
        return value
    if not is_list(value):
        raise RecordError(f"{name} is {kind_of(value)}, {_CONTENT_FORM}")
    return "".join(_text_of_part(part, f"{name}[{index}]") for index, part in enumerate(value))


def _text_of_part(part: object, name: str) -> str:
    if not isinstance(part, Mapping):
        raise RecordError(f"{name} is {kind_of(part)}, expected an object with type and text")
    kind, text = part.get("type"), part.get("text")
    if kind != TEXT_PART:
        found = f"of type {kind!r}" if isinstance(kind, str) else "without a type"
        raise RecordError(f"{name} is a part {found}, expected {TEXT_PART}: models are trained on text alone")
    if not isinstance(text, str):
        raise RecordError(f"{name}.text is {kind_of(text)}, expected a string")
    require_encodable(text, f"{name}.text")
    return text


def _tool_calls(value: object, name: str) -> list[dict[str, Any]]:
    if not is_list(value):
        raise RecordError(f"{name} is {kind_of(value)}, expected a list of objects with function")
    return [_tool_call(call, f"{name}[{index}]") for index, call in enumerate(value)]


def _tool_call(call: object, name: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise RecordError(f"{name} has no function, expected an object with name and arguments")
    called = function.get("name")
    if not isinstance(called, str) or not called:
        raise RecordError(f"{name}.function.name is {kind_of(called)}, expected the name of a tool")
    arguments = json_object(function.get("arguments", {}), f"{name}.function.arguments")
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def json_object(value: object, name: str) -> dict[str, Any]:
    """An object that a record holds as it is, or as its JSON in a string; of an empty string, the empty object.

    Raises:
        RecordError: It is neither.
    """
    decoded = decoded_json(value, name) if value != "" else {}
    if not isinstance(decoded, Mapping):
        found = "JSON of " if isinstance(value, str) else ""
        raise RecordError(f"{name} is {found}{kind_of(decoded)}, expected an object, or its JSON as a string")
    return dict(decoded)


def decoded_json(value: object, name: str) -> Any:
    """Value of a string's JSON; any other value as it is.

    Raises:
        RecordError: The string is no JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        reason = f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise RecordError(f"{name} is a string that is not valid JSON: {reason}") from None


def without_nulls(value: Any) -> Any:
    """The value without the nulls of objects, however deep: tables fill the keys that a row lacks with them.

    Strings of JSON and members of lists stay as they are.
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if is_list(value) else value


def require_encodable(text: str, name: str) -> None:
    """Rejects half of a surrogate pair, which JSON can spell and no tokenizer can encode.

    Raises:
        RecordError: The text holds one.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        problem = f"{name} holds \\u{code:04x} alone, half of a surrogate pair, which is no character"
        raise RecordError(problem) from None


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """True for lists and tuples, false for texts."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def names_in(names: Iterable[str]) -> str:
    """The first 20 names of a record's keys or a table's columns, for a message."""
    found = [shortened(str(name)) for name in names]
    more = f" and {len(found) - MOST_NAMES} more" if len(found) > MOST_NAMES else ""
    return f"{', '.join(found[:MOST_NAMES])}{more}" if found else "none"


def kind_of(value: object) -> str:
    """JSON's name of a value's type, with its article."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, Mapping):
        return "an object"
    return "a list" if is_list(value) else f"a {type(value).__name__}"
