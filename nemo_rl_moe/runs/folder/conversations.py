# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The conversation of a trajectory: its turns, their calls and times, as they stand in a line of `samples.jsonl`.

`conversation` is a list of turns: `role`, `text`, `sequence` and `tokens` (first token and the one behind the last; the
messages that were added together share them), `sampled` (the model wrote it), `trained` (it was trained on), and where
there are any `calls` (`id`, `name`, `arguments`, `outcome`), `name` and `call_id`. `sequence` is null where the model
has not read the turn. `times` has the `seconds` of the trajectory, and `[start, end]` of each response (`generation`)
and of each call (`tools`); all else is waiting.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from nemo_rl_moe.errors import encodable

Outcome = Literal["ok", "cut", "wrong", "not_called", "error", "timeout", "died", "answered", "unknown"]
"""ok, cut: the tool gave a result, which was too long; wrong: there is no such call; not_called: there was no time left
for it; answered: code of the user's own has made it, and what came back does not say that it failed; unknown: nothing
came back; else why the tool gave none."""
UNKNOWN: Outcome = "unknown"
FAILED_OUTCOMES: tuple[Outcome, ...] = ("wrong", "not_called", "error", "timeout", "died")
Span = tuple[float, float]


@dataclass(frozen=True)
class ToolUse:
    """A call that the model made in a response.

    Attributes:
        call_id: Also that of the message with its result.
        name: Of the tool, as the model wrote it; empty where it cannot be told.
        arguments: As JSON; empty where they cannot be read.
        outcome: What came of it.
    """

    call_id: str
    name: str
    arguments: str
    outcome: Outcome = "ok"

    def __post_init__(self) -> None:
        # A model can write half a surrogate pair, which no file takes.
        for name in ("call_id", "name", "arguments"):
            object.__setattr__(self, name, encodable(getattr(self, name)))


@dataclass(frozen=True)
class ConversationTurn:
    """One turn of a conversation.

    Attributes:
        role: Of its message; `prompt` of a prompt without messages, `environment` of tokens that are no message.
        text: What was said.
        sequence: Index of the sequence in which its tokens stand; None: the model has not read it.
        tokens: First of its tokens there, and the one behind the last. Messages that were added together share them.
        is_sampled: The model wrote it.
        is_trained: It was trained on.
        calls: Calls in it.
        name: Of the tool whose result it is.
        call_id: Of the call that it answers.
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
    """What a trajectory did when, in seconds from its start; what is neither of both is waiting.

    Attributes:
        seconds: Its length.
        generation: Start and end of each response.
        tools: Start and end of each call; of one that was not made both are the same.
    """

    seconds: float
    generation: tuple[Span, ...] = ()
    tools: tuple[Span, ...] = ()

    @property
    def generation_s(self) -> float:
        """Seconds in which the model wrote."""
        return covered(self.generation)

    @property
    def tools_s(self) -> float:
        """Seconds in which a tool ran."""
        return covered(self.tools)

    @property
    def waiting_s(self) -> float:
        """All other seconds."""
        return max(0.0, self.seconds - covered([*self.generation, *self.tools]))


def covered(spans: Sequence[Span]) -> float:
    """Return the seconds in at least one of the spans."""
    found, end = 0.0, -math.inf
    for start, stop in sorted(spans):
        found += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return found


def trained(turns: Sequence[ConversationTurn]) -> list[ConversationTurn]:
    """Mark what the model wrote as trained on."""
    return [replace(turn, is_trained=turn.is_sampled) for turn in turns]


def says_more(turns: Sequence[ConversationTurn]) -> bool:
    """Return whether a conversation is more than a prompt and a response, which a sample has as texts."""
    return len(turns) > 2 or any(turn.calls for turn in turns)


def conversation_json(turns: Sequence[ConversationTurn]) -> list[dict[str, object]]:
    """Return turns as they are written."""
    return [_turn_json(turn) for turn in turns]


def times_json(times: RolloutTimes) -> dict[str, object]:
    """Return times as they are written."""
    spans = {name: [[round(end, 4) for end in span] for span in getattr(times, name)] for name in _KINDS}
    return {"seconds": round(times.seconds, 4), **spans}


def conversation_of(value: object) -> list[ConversationTurn]:
    """Read turns."""
    return [_turn_of(turn) for turn in _list(value)]


def times_of(value: object) -> RolloutTimes:
    """Read times."""
    found = _mapping(value)
    seconds, generation, tools = _seconds(found.get("seconds")), *(_spans(found.get(name, [])) for name in _KINDS)
    return RolloutTimes(seconds, generation, tools)


_KINDS = ("generation", "tools")


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
    found = _mapping(value)
    sequence = found.get("sequence")
    start, end = (_count(token) for token in _list(found.get("tokens"), 2))
    return ConversationTurn(
        role=_text(found.get("role")),
        text=_text(found.get("text")),
        sequence=None if sequence is None else _count(sequence),
        tokens=(start, end),
        is_sampled=found.get("sampled") is True,
        is_trained=found.get("trained") is True,
        calls=tuple(_call_of(call) for call in _list(found.get("calls", []))),
        name=_text(found.get("name", "")),
        call_id=_text(found.get("call_id", "")),
    )


def _call_of(value: object) -> ToolUse:
    found = _mapping(value)
    call_id, name, arguments = (_text(found.get(key)) for key in ("id", "name", "arguments"))
    outcome = next((known for known in get_args(Outcome) if known == found.get("outcome")), None)
    if outcome is None:
        raise ValueError("no outcome of a call")
    return ToolUse(call_id, name, arguments, outcome)


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


def _list(value: object, size: int | None = None) -> list[object]:
    if not isinstance(value, list) or (size is not None and len(value) != size):
        raise ValueError("no list, or one of another length")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("no text")
    return value


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("no number of tokens or sequences")
    return value


def _seconds(value: object) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:  # type: ignore[operator]
        raise ValueError("no seconds")
    return float(value)  # type: ignore[arg-type]


def _spans(value: object) -> tuple[Span, ...]:
    found = []
    for span in _list(value):
        start, end = (_seconds(each) for each in _list(span, 2))
        found.append((start, max(start, end)))
    return tuple(found)


def as_arguments(values: Mapping[str, object]) -> str:
    """Return arguments of a call as JSON, whatever they are."""
    return json.dumps(dict(values), ensure_ascii=False, default=str)
