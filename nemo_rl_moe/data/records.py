# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Records of conversations: their two forms (messages, or prompt and completion) and the errors in them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from nemo_rl_moe.config.suggestions import did_you_mean, nearest

ROLES = ("system", "developer", "user", "assistant", "tool")

Message = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """One conversation.

    Attributes:
        sample_id: Where it came from: `file:line`, or `dataset[split]:row`.
        messages: The turns; each has `role` and `content`, and whatever else the chat template may read.
        first_trained_message: Assistant turns before this index are context; those from it on are trained on.
        plain: Prompt and completion as the user wrote them, when both are strings.
    """

    sample_id: str
    messages: tuple[Message, ...]
    first_trained_message: int = 0
    plain: tuple[str, str] | None = None


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be used.

    Attributes:
        sample_id: Where it is.
        reason: What is wrong with it, and what is allowed.
    """

    sample_id: str
    reason: str

    def __str__(self) -> str:
        return f"{self.sample_id}: {self.reason}"


class RecordError(ValueError):
    """A record cannot be used; the message is the reason, without the place."""


def parse_record(record: object, sample_id: str) -> Example:
    """Parses one decoded record of a conversation.

    `messages` wins where a record has it beside `prompt`; further keys are ignored.

    Raises:
        RecordError: The record cannot be used.
    """
    if not isinstance(record, Mapping):
        raise RecordError(f"the line is {kind_of(record)}, expected an object with messages, or prompt and completion")
    if record.get("messages") is not None:
        messages = _messages(record["messages"], "messages")
        _require_assistant(messages, "messages")
        return Example(sample_id, tuple(messages))
    return _prompt_and_completion(record, sample_id)


def _prompt_and_completion(record: Mapping[str, Any], sample_id: str) -> Example:
    prompt, completion = record.get("prompt"), record.get("completion")
    if prompt is None and completion is None:
        keys = ", ".join(str(key) for key in record) or "none"
        raise RecordError(f"the line has neither messages nor prompt and completion; its keys: {keys}")
    for name, value, other in (("prompt", prompt, "completion"), ("completion", completion, "prompt")):
        if value is None:
            raise RecordError(f"the line has {other} but no {name}")
    context = parse_turns(prompt, "prompt", "user")
    answer = parse_turns(completion, "completion", "assistant")
    _require_assistant(answer, "completion")
    plain = (prompt, completion) if isinstance(prompt, str) and isinstance(completion, str) else None
    return Example(sample_id, (*context, *answer), len(context), plain)


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
    if not _is_list(value):
        raise RecordError(f"{name} is {kind_of(value)}, expected a string or a list of messages")
    return _messages(value, name)


def _messages(value: object, name: str) -> list[Message]:
    if not _is_list(value):
        raise RecordError(f"{name} is {kind_of(value)}, expected a list of objects with role and content")
    if not value:
        raise RecordError(f"{name} is empty")
    return [_message(item, f"{name}[{index}]") for index, item in enumerate(value)]


def _message(value: object, name: str) -> Message:
    if not isinstance(value, Mapping):
        raise RecordError(f"{name} is {kind_of(value)}, expected an object with role and content")
    # Tables fill the keys that a row lacks with null: null means absent.
    message = {key: item for key, item in value.items() if item is not None}
    for key in ("role", "content"):
        if key not in message:
            missing = f"{name}.{key} is null, expected a string" if key in value else f"{name} has no {key}"
            raise RecordError(missing)
        if not isinstance(message[key], str):
            raise RecordError(f"{name}.{key} is {kind_of(message[key])}, expected a string")
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise RecordError(f"{name}.role is {role!r}, expected {', '.join(ROLES)}{did_you_mean(nearest(role, ROLES))}")
    if role == "assistant" and not content:
        raise RecordError(f"{name}.content is empty: an assistant turn needs text to train on")
    require_encodable(content, f"{name}.content")
    return message


def _require_assistant(messages: Sequence[Message], name: str) -> None:
    if not any(message["role"] == "assistant" for message in messages):
        raise RecordError(f"{name} has no assistant turn: there is nothing to train on")


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


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


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
    return "a list" if _is_list(value) else f"a {type(value).__name__}"
