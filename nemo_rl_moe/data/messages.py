# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Parsing of a conversation's messages: roles, content as a text or in parts, tool calls and their results.

The content of a parsed message is one text or, if it has images, a list of parts of type text and image.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemo_rl_moe.config.suggestions import did_you_mean, nearest
from nemo_rl_moe.data.image_records import IMAGE_PARTS, parse_image_part
from nemo_rl_moe.data.record_values import (
    RecordError,
    decoded_json,
    is_list,
    json_object,
    kind_of,
    require_encodable,
    without_nulls,
)

ROLES = ("system", "developer", "user", "assistant", "tool")
SYSTEM_ROLES = ("system", "developer")
TEXT_PART = "text"
CALL, RESULT = "function_call", "function"
"""Key of a turn's call, and role of its result, in OpenAI's old form of tool calls."""
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
"""Value of `from` in a ShareGPT message, `{"from": ..., "value": ...}` -> role."""
_CONTENT_FORM = "expected a string, or a list of parts of type text or image"

Message = dict[str, Any]
Content = str | list[dict[str, Any]]
ReadArguments = Callable[[object, str], dict[str, Any] | str]


def parse_turns(value: object, name: str, role: str) -> list[Message]:
    """Parse a text or a list of messages into messages. A text becomes one message with this role."""
    if isinstance(value, str):
        if not value:
            raise RecordError(f"{name} is empty")
        require_encodable(value, name)
        return [{"role": role, "content": value}]
    if not is_list(value):
        raise RecordError(f"{name} is {kind_of(value)}, expected a string or a list of messages")
    return parse_messages(value, name)


def parse_messages(value: object, name: str, read_arguments: ReadArguments = json_object) -> list[Message]:
    """Parse a list of messages. Texts of a content are joined, and arguments of tool calls become objects.

    Args:
        read_arguments: Returns the arguments of a call from their value in the record and the name of this value.
    """
    if not is_list(value):
        raise RecordError(f"{name} is {kind_of(value)}, expected a list of objects with role and content")
    if not value:
        raise RecordError(f"{name} is empty")
    return [_message(item, f"{name}[{index}]", read_arguments) for index, item in enumerate(value)]


def text_of(messages: Sequence[Message]) -> str:
    """Return the texts of messages, joined by blank lines. Messages without text are skipped."""
    texts = [content_text(message["content"]) for message in messages]
    return "\n\n".join(text for text in texts if text)


def content_text(content: Content | None) -> str:
    """Return the text of a content, without its images."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part["type"] == TEXT_PART)
    return content or ""


def with_text_around(content: Content, before: str, behind: str) -> Content:
    """Return a content with a text before and a text after it."""
    if isinstance(content, str):
        return f"{before}{content}{behind}"
    return _joined([_text_part(before), *content, _text_part(behind)])


def with_changes(messages: Sequence[Message], index: int, **changes: Any) -> list[Message]:
    """Return the messages with the values of some keys changed in the message at `index`."""
    return [*messages[:index], {**messages[index], **changes}, *messages[index + 1 :]]


def _message(value: object, name: str, read_arguments: ReadArguments) -> Message:
    if not isinstance(value, Mapping):
        raise RecordError(f"{name} is {kind_of(value)}, expected an object with role and content")
    message: Message = without_nulls(value)
    said = "content"
    if "from" in message and "role" not in message:
        message, said = _from_sharegpt(message, name), "value"
    message = _from_functions(message, name)
    role = message.get("role")
    if role is None:
        raise RecordError(f"{name}.role is null, expected a string" if "role" in value else f"{name} has no role")
    if not isinstance(role, str):
        raise RecordError(f"{name}.role is {kind_of(role)}, expected a string")
    if role not in ROLES:
        raise RecordError(f"{name}.role is {role!r}, expected {', '.join(ROLES)}{did_you_mean(nearest(role, ROLES))}")
    calls = _tool_calls(message.pop("tool_calls", []), f"{name}.tool_calls", read_arguments)
    if calls and role != "assistant":
        raise RecordError(
            f"{name}.tool_calls: in a turn of role {role}, expected assistant, since only the model calls tools"
        )
    if "content" in message:
        message["content"] = _content(message["content"], f"{name}.{said}", role)
    elif calls:
        message["content"] = ""
    else:
        missing = f"{name}.{said} is null, {_CONTENT_FORM}" if said in value else f"{name} has no {said}"
        raise RecordError(missing + (", and no tool_calls" if role == "assistant" else ""))
    if role == "assistant" and not message["content"] and not calls:
        raise RecordError(f"{name}.{said} is empty: an assistant turn needs text or tool_calls to train on")
    return {**message, "tool_calls": calls} if calls else message


def _from_sharegpt(message: Message, name: str) -> Message:
    """Convert a ShareGPT message to a message with role and content or, for a call, with `tool_calls`. Other keys
    stay."""
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


def _from_functions(message: Message, name: str) -> Message:
    """Convert a call in OpenAI's old form to `tool_calls`, and the role of a result to `tool`."""
    if message.get("role") == RESULT:
        message = {**message, "role": "tool"}
    if CALL not in message or not isinstance(message.get("role"), str):
        return message
    call, others = message[CALL], {key: value for key, value in message.items() if key != CALL}
    if not call:  # an empty cell of a table
        return others
    if message.get("tool_calls"):
        raise RecordError(f"{name} has both {CALL} and tool_calls, expected one of the two")
    return {**others, "tool_calls": [{"function": call}]}


def _content(value: object, name: str, role: str) -> Content:
    if isinstance(value, str):
        require_encodable(value, name)
        return value
    if not is_list(value):
        raise RecordError(f"{name} is {kind_of(value)}, {_CONTENT_FORM}")
    return _joined([_part(part, f"{name}[{index}]", role) for index, part in enumerate(value)])


def _part(part: object, name: str, role: str) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        raise RecordError(f"{name} is {kind_of(part)}, expected an object with type and text")
    kind, text = part.get("type"), part.get("text")
    if kind in IMAGE_PARTS:
        if role == "assistant":
            raise RecordError(f"{name} is an image in a turn of role assistant, expected text: models write text")
        return parse_image_part(part, name)
    if kind != TEXT_PART:
        found = f"of type {kind!r}" if isinstance(kind, str) else "without a type"
        raise RecordError(f"{name} is a part {found}, expected {TEXT_PART} or image")
    if not isinstance(text, str):
        raise RecordError(f"{name}.text is {kind_of(text)}, expected a string")
    require_encodable(text, f"{name}.text")
    return _text_part(text)


def _text_part(text: str) -> dict[str, Any]:
    return {"type": TEXT_PART, TEXT_PART: text}


def _joined(parts: Sequence[dict[str, Any]]) -> Content:
    """Return parts with neighbouring texts joined and empty texts dropped, or one text if there is no image."""
    joined: list[dict[str, Any]] = []
    for part in parts:
        if part["type"] == TEXT_PART and joined and joined[-1]["type"] == TEXT_PART:
            joined[-1] = _text_part(joined[-1][TEXT_PART] + part[TEXT_PART])
        elif part["type"] != TEXT_PART or part[TEXT_PART]:
            joined.append(part)
    return joined if any(part["type"] != TEXT_PART for part in joined) else content_text(joined)


def _tool_calls(given: object, name: str, read_arguments: ReadArguments) -> list[dict[str, Any]]:
    """Parse calls, given as a list or as its JSON. An empty text means no calls."""
    value = decoded_json(given, name) if given != "" else []
    if value is None:
        return []
    if not is_list(value):
        raise RecordError(f"{name} is {kind_of(value)}, expected a list of objects with function")
    return [_tool_call(call, f"{name}[{index}]", read_arguments) for index, call in enumerate(value)]


def _tool_call(call: object, name: str, read_arguments: ReadArguments) -> dict[str, Any]:
    if isinstance(call, Mapping) and "function" not in call and "name" in call and "arguments" in call:
        # In many data sets, calls have no `function` around name and arguments.
        more = {key: value for key, value in call.items() if key not in ("name", "arguments")}
        call = {**more, "function": {"name": call["name"], "arguments": call["arguments"]}}
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise RecordError(f"{name} has no function, expected an object with name and arguments")
    called = function.get("name")
    if not isinstance(called, str) or not called:
        raise RecordError(f"{name}.function.name is {kind_of(called)}, expected the name of a tool")
    arguments = read_arguments(function.get("arguments", {}), f"{name}.function.arguments")
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}
