# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The conversation of a trajectory, as stored in a line of `samples.jsonl`: turns, tool calls and times.

`conversation` is a list of turns. Each has `role`, `text`, `sequence` (null if the model has not read the turn),
`tokens` (`[first, end)`), `sampled` and `trained`, and optionally `calls` (`id`, `name`, `arguments`, `outcome`),
`name` and `call_id`. `times` has the `seconds` of the trajectory, and `[start, end]` of each response (`generation`)
and of each call (`tools`). The remaining time is waiting.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

from nemo_rl_moe.errors import encodable

Outcome = Literal["ok", "cut", "wrong", "not_called", "error", "timeout", "died", "answered", "unknown"]
"""Outcome of a tool call. ok: the tool returned a result. cut: the result was too long and was cut. wrong: no such
tool, or wrong arguments. not_called: no time was left. error, timeout, died: how the tool failed. answered: the user's
code made the call and reported no failure. unknown: no result came back."""
UNKNOWN: Outcome = "unknown"
FAILED_OUTCOMES: tuple[Outcome, ...] = ("wrong", "not_called", "error", "timeout", "died")
Span = tuple[float, float]
"""Start and end, in seconds from the trajectory's start."""
Value = TypeVar("Value")
_KINDS = ("generation", "tools")


@dataclass(frozen=True)
class ToolUse:
    """A call that the model made in a response.

    Attributes:
        call_id: Id of the call. The message with the result has the same id.
        name: Name of the tool, as the model wrote it. Empty if it cannot be parsed.
        arguments: JSON text. Empty if they cannot be parsed.
    """

    call_id: str
    name: str
    arguments: str
    outcome: Outcome = "ok"

    def __post_init__(self) -> None:
        # A model can write half a surrogate pair, which cannot be encoded.
        for name in ("call_id", "name", "arguments"):
            object.__setattr__(self, name, encodable(getattr(self, name)))


@dataclass(frozen=True)
class ConversationTurn:
    """One turn of a conversation.

    Attributes:
        role: Role of the message, `prompt` for a prompt without messages, or `environment` for other tokens.
        sequence: Index of the sequence that contains the turn's tokens. None if the model has not read the turn.
        tokens: First token and end (exclusive) in that sequence. Messages that were added together have the same range.
        is_sampled: Whether the model wrote the turn.
        name: Name of the tool, if the turn is the result of a call.
        call_id: Id of the call whose result the turn is.
    """

    role: str
    text: str
    sequence: int | None
    tokens: tuple[int, int]
    is_sampled: bool = False
    is_trained: bool = False
    calls: tuple[ToolUse, ...] = ()
    name: str = ""
    call_id: str = ""

    def __post_init__(self) -> None:
        for name in ("role", "text", "name", "call_id"):
            object.__setattr__(self, name, encodable(getattr(self, name)))


@dataclass(frozen=True)
class RolloutTimes:
    """Times of a trajectory. The time outside of both kinds of spans is waiting.

    Attributes:
        seconds: Duration of the trajectory.
        generation: Span of each response.
        tools: Span of each tool call. Start and end are equal if the call was not made.
    """

    seconds: float
    generation: tuple[Span, ...] = ()
    tools: tuple[Span, ...] = ()

    @property
    def generation_s(self) -> float:
        return covered(self.generation)

    @property
    def tools_s(self) -> float:
        return covered(self.tools)

    @property
    def waiting_s(self) -> float:
        return max(0.0, self.seconds - covered([*self.generation, *self.tools]))


def covered(spans: Sequence[Span]) -> float:
    """Return the length of the union of spans, in seconds."""
    found, end = 0.0, -math.inf
    for start, stop in sorted(spans):
        found += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return found


def trained(turns: Sequence[ConversationTurn]) -> list[ConversationTurn]:
    """Return the turns with `is_trained` set to True if the model wrote the turn, and to False otherwise."""
    return [replace(turn, is_trained=turn.is_sampled) for turn in turns]


def says_more(turns: Sequence[ConversationTurn]) -> bool:
    """Return whether a conversation has more than a prompt and a response. Samples store these two texts separately."""
    return len(turns) > 2 or any(turn.calls or turn.sequence is None for turn in turns)


def conversation_json(turns: Sequence[ConversationTurn]) -> list[dict[str, object]]:
    """Return turns as JSON."""
    return [_turn_json(turn) for turn in turns]


def times_json(times: RolloutTimes) -> dict[str, object]:
    """Return times as JSON."""
    spans = {name: [[round(end, 4) for end in span] for span in getattr(times, name)] for name in _KINDS}
    return {"seconds": round(times.seconds, 4), **spans}


def conversation_of(value: object) -> list[ConversationTurn]:
    """Return the turns in a JSON value. Raise an error if it is not valid."""
    return [_turn_of(turn) for turn in _as(list, value)]


def times_of(value: object) -> RolloutTimes:
    """Return the times in a JSON value. Raise an error if it is not valid."""
    found = _as(dict, value)
    generation, tools = (_spans(found.get(name, [])) for name in _KINDS)
    return RolloutTimes(_seconds(found.get("seconds")), generation, tools)


def _turn_json(turn: ConversationTurn) -> dict[str, object]:
    found: dict[str, object] = {
        "role": turn.role,
        "text": turn.text,
        "sequence": turn.sequence,
        "tokens": list(turn.tokens),
        "sampled": turn.is_sampled,
        "trained": turn.is_trained,
    }
    if turn.calls:
        found["calls"] = [
            {"id": call.call_id, "name": call.name, "arguments": call.arguments, "outcome": call.outcome}
            for call in turn.calls
        ]
    return found | {name: value for name, value in (("name", turn.name), ("call_id", turn.call_id)) if value}


def _turn_of(value: object) -> ConversationTurn:
    found = _as(dict, value)
    sequence = found.get("sequence")
    start, end = (_count(token) for token in _pair(found.get("tokens")))
    return ConversationTurn(
        role=_as(str, found.get("role")),
        text=_as(str, found.get("text")),
        sequence=None if sequence is None else _count(sequence),
        tokens=(start, end),
        is_sampled=found.get("sampled") is True,
        is_trained=found.get("trained") is True,
        calls=tuple(_call_of(call) for call in _as(list, found.get("calls", []))),
        name=_as(str, found.get("name", "")),
        call_id=_as(str, found.get("call_id", "")),
    )


def _call_of(value: object) -> ToolUse:
    found = _as(dict, value)
    call_id, name, arguments = (_as(str, found.get(key)) for key in ("id", "name", "arguments"))
    outcome: Any = found.get("outcome")
    if outcome not in get_args(Outcome):
        raise ValueError("no outcome of a call")
    return ToolUse(call_id, name, arguments, outcome)


def _as(kind: type[Value], value: object) -> Value:
    if not isinstance(value, kind):
        raise ValueError(f"no {kind.__name__}")
    return value


def _pair(value: object) -> tuple[object, object]:
    first, second = _as(list, value)
    return first, second


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("expected a number of tokens or sequences that is 0 or more")
    return value


def _seconds(value: object) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:  # type: ignore[operator]
        raise ValueError("no seconds")
    return float(value)  # type: ignore[arg-type]


def _spans(value: object) -> tuple[Span, ...]:
    found = []
    for span in _as(list, value):
        start, end = (_seconds(each) for each in _pair(span))
        found.append((start, max(start, end)))
    return tuple(found)


def as_arguments(values: Mapping[str, object]) -> str:
    """Return arguments of a call as JSON. Values of types that JSON lacks become their `str`."""
    return json.dumps(dict(values), ensure_ascii=False, default=str)
