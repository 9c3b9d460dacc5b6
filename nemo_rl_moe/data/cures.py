# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Cures for conversations that a chat template cannot show: changes of settings or data. A cure is only suggested after
a trial shows that it works."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemo_rl_moe.config.tool_definitions import SET_BY_THE_RUN
from nemo_rl_moe.data.left_out import THINKING_KEYS
from nemo_rl_moe.data.messages import Message
from nemo_rl_moe.data.template_inputs import TEMPLATE_KWARGS
from nemo_rl_moe.data.template_probes import PROBE_TOOL
from nemo_rl_moe.data.turn_spans import RenderError

_MOST_SEARCHES = 8
_OTHER_TEMPLATE = "; set policy.tokenizer.chat_template to a template that takes it"


@dataclass(frozen=True)
class Request:
    """Input of a chat template. `trained` are the indices of the assistant turns to train on, or None for a prompt."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None
    kwargs: Mapping[str, Any]
    trained: Collection[int] | None


Renders = Callable[[Request], object]
"""A function that renders a request. Raises `RenderError`."""
_Change = tuple[str, Request]


class Cures:
    """Searches changes with which a chat template renders conversations that it has refused.

    The search is made once for each kind of problem. Other conversations with this problem only try the same change.

    Args:
        names: Name of a variable that the template reads -> texts with which the template compares the variable.
        tokens: Names in `names` that are special tokens.
    """

    def __init__(self, names: Mapping[str, Sequence[str]], tokens: Collection[str], render: Renders):
        switches = [name for name in names if name not in (*tokens, *SET_BY_THE_RUN)]
        switches.sort(key=lambda name: "think" not in name and "reason" not in name)
        self._switches = {name: names[name] for name in switches}
        self._render = render
        self._known: dict[str, str | None] = {}

    def advice(self, problem: str, request: Request) -> str:
        """Return the end of an error message: the change with which the conversation works, or the advice to set
        another template."""
        kind = "".join(letter for letter in problem if not letter.isdigit())[:80]
        if kind not in self._known and len(self._known) < _MOST_SEARCHES:
            self._known[kind] = next(self._that_work(request), None)
        words = self._known.get(kind)
        if words is not None and any(self._that_work(request, words)):
            return f"; it works with {words}"
        return "" if "policy.tokenizer.chat_template" in problem else _OTHER_TEMPLATE

    def _that_work(self, request: Request, wanted: str | None = None) -> Iterator[str]:
        for words, changed in _changes(request, self._switches):
            if wanted is None or words == wanted:
                try:
                    self._render(changed)
                except (RenderError, RecursionError):
                    continue
                yield words


def _changes(request: Request, switches: Mapping[str, Sequence[str]]) -> Iterator[_Change]:
    """Yield changed requests, each with a description of the change. Changes of the run's settings come first."""
    for name, texts in switches.items():
        for value in (True, False, *texts, ""):
            if request.kwargs.get(name) != value:
                changed = replace(request, kwargs={**request.kwargs, name: value})
                yield f"data.{TEMPLATE_KWARGS}: {{{name}: {json.dumps(value)}}}", changed
    if not request.tools:
        yield "definitions of tools (data.tools)", replace(request, tools=[PROBE_TOOL])
    yield from _changes_of_data(request)


def _changes_of_data(request: Request) -> Iterator[_Change]:
    messages = request.messages
    if (single := _with_single_calls(request)) is not None:
        yield "one call a turn, each before its result", single
    first, *rest = messages
    pair = [first, *rest[:1]]
    texts = [message["content"] for message in pair if isinstance(message["content"], str)]
    if [message["role"] for message in pair] in (["system", "user"], ["developer", "user"]) and len(texts) == 2:
        trained = request.trained if request.trained is None else [index - 1 for index in request.trained]
        merged = replace(request, messages=[{**rest[0], "content": "\n\n".join(texts)}, *rest[1:]], trained=trained)
        yield "the system turn's text at the beginning of the first question", merged
    in_content = [_with_thinking_in_content(message) for message in messages]
    if in_content != list(messages):
        yield "the thinking in the content, between <think> and </think>", replace(request, messages=in_content)
    silent = [{**message, "content": ""} if message.get("tool_calls") else message for message in messages]
    if silent != list(messages):
        yield "no texts beside tool calls", replace(request, messages=silent)
    if request.trained is not None and len(request.trained) > 1:
        yield (
            "other assistant turns than the last as context (train: false)",
            replace(request, trained=[max(request.trained)]),
        )


def _with_thinking_in_content(message: Message) -> Message:
    thinking = next((message[key] for key in THINKING_KEYS if isinstance(message.get(key), str) and message[key]), None)
    if message["role"] != "assistant" or thinking is None:
        return message
    others = {key: value for key, value in message.items() if key not in THINKING_KEYS}
    return {**others, "content": f"<think>\n{thinking}\n</think>\n\n{message['content'] or ''}"}


def _with_single_calls(request: Request) -> Request | None:
    """Return a request in which each turn has one call, followed by its result. None if the request has this form
    already or lacks results."""
    found: list[Message] = []
    trained: list[int] = []
    index, has_several = 0, False
    while index < len(request.messages):
        message = request.messages[index]
        calls = message.get("tool_calls") or []
        results = request.messages[index + 1 : index + 1 + len(calls)] if len(calls) > 1 else []
        pieces = [message]
        if len(calls) > 1:
            if len(results) < len(calls) or any(result["role"] != "tool" for result in results):
                return None
            has_several = True
            pieces = [
                piece
                for call, result in zip(calls, results, strict=True)
                for piece in (
                    {**message, "content": "" if call is not calls[0] else message["content"], "tool_calls": [call]},
                    result,
                )
            ]
        for piece in pieces:
            if piece["role"] == "assistant" and request.trained is not None and index in request.trained:
                trained.append(len(found))
            found.append(piece)
        index += 1 + len(results)
    if not has_several:
        return None
    return replace(request, messages=found, trained=None if request.trained is None else trained)
