# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Forms of tool calls that chat templates accept, and checks whether a template shows all parts of calls."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_moe.data.left_out import (
    CALLS_ALONE,
    CALLS_WITH_FEWER_ARGUMENTS,
    CALLS_WITHOUT_ARGUMENTS,
    CALLS_WITHOUT_NAMES,
    RenderVariant,
)
from nemo_rl_moe.data.messages import Message, with_changes
from nemo_rl_moe.data.turn_spans import RenderError

_STAND_IN = "something_else"
_BEST_FIRST = (None, CALLS_WITH_FEWER_ARGUMENTS, CALLS_WITHOUT_NAMES, CALLS_WITHOUT_ARGUMENTS, CALLS_ALONE)
_Call = Mapping[str, Any]


@dataclass(frozen=True)
class ToolCallForm:
    """Form in which a template accepts turns with tool calls.

    Attributes:
        content: Content of a turn without text: an empty text or null, depending on the template.
        arguments_as_text: Whether arguments are JSON in a string instead of an object.
    """

    content: str | None
    arguments_as_text: bool

    def of(self, message: Message) -> Message:
        if "tool_calls" not in message:
            return message
        calls = [
            _changed(call, arguments=json.dumps(arguments, ensure_ascii=False))
            if self.arguments_as_text and not isinstance(arguments, str)
            else call
            for call in message["tool_calls"]
            for arguments in [call["function"]["arguments"]]
        ]
        return {**message, "content": message["content"] or self.content, "tool_calls": calls}

    def of_all(self, messages: Sequence[Message]) -> list[Message]:
        return [self.of(message) for message in messages]


FORMS = tuple(ToolCallForm(content, as_text) for as_text in (False, True) for content in ("", None))


def best_form(messages: Sequence[Message], render: RenderVariant) -> tuple[ToolCallForm, str | None]:
    """Return the form in which a template shows a conversation's calls best, and a note on parts that it does not
    show."""
    found: tuple[ToolCallForm, str | None] | None = None
    problem: RenderError | None = None
    for form in FORMS:
        try:
            note = note_on_calls(messages, form, render)
        except RenderError as error:
            problem = problem or error
            continue
        if found is None or _BEST_FIRST.index(note) < _BEST_FIRST.index(found[1]):
            found = form, note
    if found is None:
        assert problem is not None
        raise problem
    return found


def note_on_calls(messages: Sequence[Message], form: ToolCallForm, render: RenderVariant) -> str | None:
    """Return a note on the parts of tool calls that a template drops if the calls have the form `form`. None without
    such parts.

    Raises:
        RenderError: The template does not show a turn's calls, writes arguments as a Python object, or refuses the
            conversation.
    """
    text = render(form.of_all(messages))
    missing: set[str] = set()
    for index, turn in enumerate(messages):
        if calls := turn.get("tool_calls"):

            def is_same(others: Sequence[_Call], place: int = index) -> bool:
                try:
                    return render(form.of_all(with_changes(messages, place, tool_calls=others))) == text
                except RenderError:  # the template refuses this variant
                    return False

            written = [call["function"]["arguments"] for call in calls if call["function"]["arguments"]]
            is_python = any(str(arguments) in text for arguments in written if not isinstance(arguments, str))
            if is_same([]) or (not form.arguments_as_text and is_python):
                raise RenderError(
                    "a turn calls tools, and the chat template shows no tool calls; "
                    "set policy.tokenizer.chat_template to a template that does"
                )
            if is_same([_changed(call, name=_STAND_IN) for call in calls]):
                missing.add("names")
            if written and is_same([_changed(call, arguments={}) for call in calls]):
                missing.add("arguments")
            elif any(is_same(variant) for variant in _with_one_argument_changed(calls)):
                missing.add("some arguments")
    if "arguments" in missing:
        return CALLS_ALONE if "names" in missing else CALLS_WITHOUT_ARGUMENTS
    if "names" in missing:
        return CALLS_WITHOUT_NAMES
    return CALLS_WITH_FEWER_ARGUMENTS if missing else None


def not_shown(messages: Sequence[Message], text: str) -> str | None:
    """Return the first arguments that a rendering lacks, among arguments that are text because they are no JSON
    object. None if it has all."""
    given = (call["function"]["arguments"] for turn in messages for call in turn.get("tool_calls", ()))
    broken = (each for each in given if isinstance(each, str))
    return next(
        (each for each in broken if each not in text and json.dumps(each, ensure_ascii=False) not in text), None
    )


def _with_one_argument_changed(calls: Sequence[_Call]) -> list[list[_Call]]:
    return [
        [*calls[:place], _changed(call, arguments={**arguments, name: _STAND_IN}), *calls[place + 1 :]]
        for place, call in enumerate(calls)
        for arguments in [call["function"]["arguments"]]
        for name, value in ({} if isinstance(arguments, str) else arguments).items()
        if value != _STAND_IN
    ]


def _changed(call: _Call, **changes: Any) -> _Call:
    return {**call, "function": {**call["function"], **changes}}
