# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Replies to requests for chat completions: a response as a message, with its tool calls."""

import json
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemo_rl_moe.data.messages import Message
from nemo_rl_moe.data.thinking import THINK_END, Thinking
from nemo_rl_moe.endpoint.chat_requests import ChatRequest
from nemo_rl_moe.generation.interface import TokenIds
from nemo_rl_moe.tools.formats.interface import ParsedCall, Schemas, ToolCall, ToolFormat
from nemo_rl_moe.tools.formats.typed_values import properties_of


@dataclass(frozen=True)
class ReadTurn:
    """A response as an agent gets it.

    Attributes:
        content: The text without calls and thinking.
        calls: Calls in the response. If a call is malformed, they are empty and `content` is the full text.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()
    num_malformed: int = 0
    reasoning: str = ""


def read_turn(text: str, request: ChatRequest, tool_format: ToolFormat | None, *, begins_in_thinking: bool) -> ReadTurn:
    """Return a response with its calls.

    Args:
        tool_format: Format in which the model writes calls. None without tools.
        begins_in_thinking: Whether the prompt has opened a think block.
    """
    if tool_format is None or not request.reads_calls:
        return ReadTurn(text)
    functions = [tool["function"] for tool in request.tools]
    schemas = {function["name"]: properties_of(function.get("parameters")) for function in functions}
    found = tool_format.calls(text, schemas, begins_in_thinking=begins_in_thinking)
    calls = tuple(call for call in found if isinstance(call, ToolCall) and _is_encodable(call))
    if len(calls) < len(found):
        return ReadTurn(text, num_malformed=len(found) - len(calls))
    if not calls:
        return ReadTurn(text)
    return ReadTurn(_before_calls(text, found, tool_format, schemas, begins_in_thinking=begins_in_thinking), calls)


def without_thinking(read: ReadTurn, thinking: Thinking | None, *, is_opened: bool) -> ReadTurn:
    """Return a response with its thinking as `reasoning`. A response with a malformed call keeps its full text.

    Args:
        thinking: Marks of the model's thinking. None if it has none.
        is_opened: Whether the prompt has begun the thinking.
    """
    if thinking is None or read.num_malformed:
        return read
    reasoning, content = thinking.split(read.content, is_opened=is_opened)
    return replace(read, content=content, reasoning=reasoning)


def message_of(turn: ReadTurn, first_call: int) -> Message:
    """Return a response as a message in OpenAI's form. `first_call` is the number of earlier calls."""
    message: Message = {"role": "assistant", "content": turn.content or (None if turn.calls else "")}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": f"call{(first_call + index) % 100_000:05}",  # some templates want nine characters
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for index, call in enumerate(turn.calls)
        ]
    return message


def chat_choice(
    request: ChatRequest,
    message: Message,
    token_ids: TokenIds,
    logprobs: Sequence[float],
    text_of: Callable[[TokenIds], str],
    *,
    is_cut: bool,
    index: int = 0,
) -> dict[str, Any]:
    """Return a response as one of the choices of a reply.

    Args:
        message: Result of `message_of`.
        token_ids: Tokens of the response.
        logprobs: Log-probability of each token, in nats.
        text_of: Decodes token ids.
        is_cut: Whether the response was truncated.
    """
    reason = "length" if is_cut else "tool_calls" if message.get("tool_calls") else "stop"
    choice: dict[str, Any] = {"index": index, "message": message, "finish_reason": reason, "logprobs": None}
    if request.wants_logprobs:
        pairs = zip(token_ids, logprobs, strict=True)
        choice["logprobs"] = {"content": [_logprob(text_of((token,)), logprob) for token, logprob in pairs]}
    if request.wants_token_ids:
        choice["token_ids"] = list(token_ids)
    return choice


def chat_reply(
    request: ChatRequest,
    choices: Sequence[dict[str, Any]],
    prompt_ids: Sequence[int],
    num_sampled: int,
    *,
    name: str,
    model: str,
) -> dict[str, Any]:
    """Return the reply with the choices.

    Args:
        prompt_ids: Tokens before the response.
        num_sampled: Number of tokens of all choices.
        name: Id of the reply.
    """
    reply = {
        "id": name,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": list(choices),
        "usage": usage_of(len(prompt_ids), num_sampled),
    }
    if request.wants_token_ids:
        reply["prompt_token_ids"] = list(prompt_ids)
    return reply


def usage_of(num_prompt: int, num_sampled: int) -> dict[str, int]:
    """Return the numbers of tokens of a reply."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }


def chat_chunks(reply: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a reply as chunks of a stream: each message and its end, and then the numbers of tokens."""
    head = {**reply, "object": "chat.completion.chunk"}
    usage = head.pop("usage")
    chunks = []
    for choice in reply["choices"]:
        message = dict(choice["message"])
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        rest = {key: value for key, value in choice.items() if key != "message"}
        end = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": None}
        chunks += [{**head, "choices": [{**rest, "delta": message, "finish_reason": None}]}, {**head, "choices": [end]}]
    return [*chunks, {**head, "choices": [], "usage": usage}]


def completion_chunks(reply: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a reply to a request for completions as chunks of a stream: each choice, and the numbers of tokens."""
    head = {key: value for key, value in reply.items() if key != "usage"}
    chunks = [{**head, "choices": [choice]} for choice in reply["choices"]]
    return [*chunks, {**head, "choices": [], "usage": reply["usage"]}]


def _logprob(text: str, logprob: float) -> dict[str, Any]:
    # A token with a part of a character has a text without the part's bytes.
    own = None if "\ufffd" in text else list(text.encode(errors="replace"))
    return {"token": text, "logprob": logprob, "bytes": own, "top_logprobs": []}


def _is_encodable(call: ToolCall) -> bool:
    """Return whether clients can send a call back. JSON text may contain half a surrogate pair."""
    try:
        json.dumps([call.name, call.arguments], ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError):
        return False
    return True


def _before_calls(
    text: str, calls: list[ParsedCall], tool_format: ToolFormat, schemas: Schemas, *, begins_in_thinking: bool
) -> str:
    """Return the text before the first call. It is searched, because formats do not return the position of a call."""
    # A binary search, as the text from a position on has all calls only if the position is before the first call.
    first = text.index(THINK_END) + len(THINK_END) if begins_in_thinking and THINK_END in text else 0

    def has_all_from(place: int) -> bool:
        return tool_format.calls(text[place:], schemas) == calls

    # The end of a think block could look like a call if its beginning is cut off.
    thought = text.rfind(THINK_END) + len(THINK_END)
    if THINK_END in text and has_all_from(thought):
        first = thought
    places = [found.start() for found in re.finditer(re.escape(tool_format.example[0]), text[first:])]
    index = bisect_left(places, True, key=lambda place: not has_all_from(first + place))
    before = text[: first + places[index - 1]] if index else text[:first]
    return before.rstrip().removesuffix(tool_format.mark).rstrip() if index else before
