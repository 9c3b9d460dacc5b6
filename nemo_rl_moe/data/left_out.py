# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Errors and notes about parts of a conversation that a chat template does not show."""

import re
from collections.abc import Callable, Sequence

from nemo_rl_moe.data.messages import Message, content_text, with_changes
from nemo_rl_moe.data.thinking import THINK_END, THINK_START
from nemo_rl_moe.data.turn_spans import RenderError, Span

RenderVariant = Callable[[Sequence[Message]], str]
"""A function that renders a variant of the conversation in the same way as the conversation itself."""

THINKING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys under which a turn has its thinking. Data and templates use different ones."""
# Notes on an example, which messages print after the word "with".
EARLIER_THINKING = "thinking of earlier turns that the chat template leaves out"
EMPTY_THINKING = "an empty <think> block that is trained on"
TEXT_BESIDE_CALLS = "text of a turn beside its tool calls that the chat template leaves out"
CALLS_WITHOUT_ARGUMENTS = "tool calls of which the chat template shows names, not arguments"
CALLS_WITHOUT_NAMES = "tool calls of which the chat template shows arguments, not names"
CALLS_WITH_FEWER_ARGUMENTS = "tool calls of which the chat template shows not all arguments"
CALLS_ALONE = "tool calls of which the chat template shows neither names nor arguments"
_EMPTY_BLOCK = re.compile(rf"{THINK_START}\s*{THINK_END}")
_BLOCK_AT_START = re.compile(r"\s*<think>(.*?)</think>\n*", re.DOTALL)
_SURELY_ITS_OWN = 40
_STAND_IN = "something else"


def read_keys(template: str) -> tuple[str, ...]:
    """Return those `THINKING_KEYS` that a chat template reads."""
    return tuple(key for key in THINKING_KEYS if re.search(rf"(?:\.|['\"]){key}\b", template))


def with_thinking_named(message: Message, read: Sequence[str]) -> Message:
    """Return a turn with its thinking under the key that the template reads, if `read` contains exactly one key."""
    given = [key for key in THINKING_KEYS if message.get(key)]
    if message["role"] != "assistant" or len(given) != 1 or len(read) != 1 or given == list(read):
        return message
    return {**{key: value for key, value in message.items() if key != given[0]}, read[0]: message[given[0]]}


def with_thinking_apart(message: Message, key: str) -> Message:
    """Return a turn in which the think block at the beginning of the content is moved to `key`."""
    block = _BLOCK_AT_START.match(message["content"] or "") if message["role"] == "assistant" else None
    if block is None or any(message.get(name) for name in THINKING_KEYS):
        return message
    return {**message, key: block[1].strip("\n"), "content": message["content"][block.end() :]}


def require_all_shown(messages: Sequence[Message], text: str, render: RenderVariant) -> None:
    """Raise `RenderError` if the text of a conversation lacks a part that must not be missing.

    These parts are system turns, tools' results, tool calls and, in the last turn, the thinking and the text next to
    calls. In earlier turns, thinking and text next to calls may be missing, as many templates drop them on purpose,
    also at inference. `left_out_notes` reports them.
    """
    for index, message in enumerate(messages):
        if message["role"] in ("user", "assistant"):
            calls = message.get("tool_calls") or []
            if len(calls) > 1 and render(with_changes(messages, index, tool_calls=calls[:-1])) == text:
                raise RenderError(f"turn {index} calls {len(calls)} tools, and the chat template shows fewer calls")
            continue
        # Compared with a rendering of another content, because other turns may contain the same words.
        other = with_changes(messages, index, content=_STAND_IN)
        if not _is_shown(content_text(message["content"]), text, other, messages, render):
            raise RenderError(
                f"turn {index} is of role {message['role']}, and the chat template leaves it out; set "
                "policy.tokenizer.chat_template to a template that shows it, or leave the turn out"
            )
    last = len(messages) - 1
    if messages[last]["role"] == "assistant" and _lacks_thinking(messages, last, text, render):
        raise RenderError(
            f"turn {last} has thinking, and the chat template shows none of it; set "
            "policy.tokenizer.chat_template to a template that does, or leave the thinking out"
        )
    if _lacks_text_beside_calls(messages, last, text, render):
        raise RenderError(
            f"turn {last} has a text beside its tool calls, and the chat template shows none of it; set "
            "policy.tokenizer.chat_template to a template that does, or leave the text out"
        )


def _is_shown(
    part: str, text: str, other: Sequence[Message], messages: Sequence[Message], render: RenderVariant
) -> bool:
    """Return whether a conversation's text shows a part of it. `other` is the conversation with a stand-in for the
    part."""
    part = part.strip()
    if not part or part == _STAND_IN:
        return True
    # A long part in the text that no other turn quotes is shown. This saves a second rendering.
    if len(part) >= _SURELY_ITS_OWN and part in text and str(messages).count(repr(part)[1:-1]) == 1:
        return True
    try:
        return render(other) != text
    except RenderError:  # the template refuses `other`
        return True


def left_out_notes(
    messages: Sequence[Message], text: str, spans: Sequence[Span], render: RenderVariant
) -> tuple[str, ...]:
    """Return notes on parts of earlier turns that the text does not show, and on empty think blocks that are trained
    on."""
    earlier = [place for place in range(len(messages) - 1) if messages[place]["role"] == "assistant"]
    found = [EARLIER_THINKING] if any(_lacks_thinking(messages, place, text, render) for place in earlier) else []
    if any(_lacks_text_beside_calls(messages, place, text, render) for place in earlier):
        found.append(TEXT_BESIDE_CALLS)
    if any(_EMPTY_BLOCK.search(text, _start_of_thinking(text, first), end) for first, end in spans):
        found.append(EMPTY_THINKING)
    return tuple(found)


def _start_of_thinking(text: str, first: int) -> int:
    """Return the start of a turn. A think block that the generation prompt opens right before it belongs to the
    turn."""
    before = text[:first].rstrip()
    return len(before) - len(THINK_START) if before.endswith(THINK_START) else first


def _lacks_text_beside_calls(messages: Sequence[Message], index: int, text: str, render: RenderVariant) -> bool:
    turn = messages[index]
    if not turn.get("tool_calls"):
        return False
    # Only the text after a think block counts, because templates may drop the block on purpose.
    block, found, said = (turn["content"] or "").rpartition(THINK_END)
    other = with_changes(messages, index, content=f"{block}{found}{_STAND_IN}")
    return not _is_shown(said, text, other, messages, render)


def _lacks_thinking(messages: Sequence[Message], index: int, text: str, render: RenderVariant) -> bool:
    turn = messages[index]
    content = turn["content"] or ""
    before, found, answer = content.rpartition(THINK_END)
    opened, mark, thinking = before.rpartition(THINK_START)
    given = {key: turn[key] for key in THINKING_KEYS if isinstance(turn.get(key), str)}
    # The thinking is replaced, not removed, because templates trim the text after a block.
    replaced = f"{opened}{mark}{_STAND_IN}{found}{answer}" if found else content
    other = with_changes(messages, index, **dict.fromkeys(given, _STAND_IN), content=replaced)
    return any(not _is_shown(part, text, other, messages, render) for part in (thinking, *given.values()))
