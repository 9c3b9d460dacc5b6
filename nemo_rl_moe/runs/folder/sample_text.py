# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Samples as lines of text for the console, the terminal view and loggers.

The lines contain a run's texts unchanged. Callers escape control characters (`errors.printable`) before they print.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nemo_rl_moe.errors import counted, printable
from nemo_rl_moe.runs.folder.conversations import (
    FAILED_OUTCOMES,
    UNKNOWN,
    ConversationTurn,
    RolloutTimes,
    ToolUse,
    says_more,
)

Styled = tuple[str, str]
"""Text, and its style in a terminal."""
Line = tuple[Styled, ...]
TRAINED, SAMPLED = "*", ">"
LEGEND = f"{TRAINED} trained on, {SAMPLED} written by the model and not trained on"
UNREAD = "not read by the model"
_STYLES = {TRAINED: "green", SAMPLED: "cyan", "tool": "magenta", "bar": "dim"}
_ROLE_WIDTH, _BAR_WIDTH = 11, 32
_BAR = {"generation": ("#", "green"), "tools": ("=", "magenta"), "waiting": (".", "dim")}
LONGEST_ON_ONE_LINE = 400


@dataclass(frozen=True)
class ShownSample:
    """A sample to display.

    Attributes:
        reward: The reward as text. Empty without a reward.
        verdict: `right`, `wrong`, `truncated`, or the reason why the sample could not be scored.
        left_out: Reason why the sample was not trained on. Empty if it was trained on, and in a validation.
        num_tokens: Number of sampled tokens.
        turns: The conversation. Empty if there are only a prompt and a response.
    """

    step: int
    split: str
    sample_id: str
    prompt: str
    response: str
    reward: str
    verdict: str
    left_out: str = ""
    num_tokens: int = 0
    turns: tuple[ConversationTurn, ...] = ()
    times: RolloutTimes | None = None


@dataclass(frozen=True)
class TextLimits:
    """Largest number of characters and of lines of a text that are shown."""

    characters: int = LONGEST_ON_ONE_LINE
    lines: int = 8


SAMPLE_LIMITS = TextLimits(characters=4000, lines=100)
"""Limits for loggers. They fold long texts."""


def sample_lines(sample: ShownSample, limits: TextLimits | None = None) -> list[Line]:
    """Return the lines of a sample: one line for a prompt and a response, several lines for a conversation."""
    verdict = sample.verdict if sample.verdict in ("right", "wrong", "truncated") else "failed"
    left_out = f"  (left out: {_on_one_line(sample.left_out)})" if sample.left_out else ""
    if not says_more(sample.turns):
        text = f"{_on_one_line(sample.prompt)}  ->  {_on_one_line(sample.response)}"
        return [((f"  {verdict:11}{text}{left_out}", ""),)]
    head = f"  {verdict:11}{_on_one_line(sample.sample_id)}: {conversation_summary(sample)}{left_out}"
    lines: list[Line] = [((head, "bold"),)]
    if verdict == "failed":
        lines.append((("    fault      ", "dim"), (_on_one_line(sample.verdict), "red")))
    sequence = 0
    for turn in sample.turns:
        if turn.sequence is not None and turn.sequence != sequence:
            sequence = turn.sequence
            lines.append(((f"    -- sequence {sequence + 1}, which does not continue the turns above --", "dim"),))
        lines += _turn_lines(turn, limits or TextLimits())
    if sample.times is not None:
        lines.append(time_line(sample.times))
    return lines


def conversation_summary(sample: ShownSample) -> str:
    """Return a summary of a conversation: reward, and numbers of responses, calls and tokens."""
    calls = [call for turn in sample.turns for call in turn.calls]
    counts = {
        "failed": sum(call.outcome in FAILED_OUTCOMES for call in calls),
        "unknown": sum(call.outcome == UNKNOWN for call in calls),
    }
    parts = [f"reward {sample.reward}"] if sample.reward else []
    parts.append(counted(sum(turn.is_sampled for turn in sample.turns), "response"))
    if calls:
        of_them = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
        parts.append(counted(len(calls), "call") + (f" ({of_them})" if of_them else ""))
    num_trained = sum(turn.tokens[1] - turn.tokens[0] for turn in sample.turns if turn.is_trained)
    trained = "" if sample.split == "val" else f", {num_trained:,} trained on"
    parts.append(counted(sample.num_tokens, "sampled token") + trained)
    return ", ".join(parts)


def as_text(lines: Sequence[Line]) -> str:
    """Return lines as plain text with escaped control characters."""
    return "\n".join("".join(printable(text, kept="\t") for text, _ in line) for line in lines)


def samples_text(samples: Sequence[ShownSample]) -> str:
    """Return samples as plain text, with the legend."""
    return "\n\n".join([LEGEND, *(as_text(sample_lines(sample, SAMPLE_LIMITS)) for sample in samples)])


def time_line(times: RolloutTimes) -> Line:
    """Return the times of a trajectory as a bar of characters, followed by the seconds."""
    seconds = (
        f"] {times.seconds:.3g} s: # generation {times.generation_s:.3g} s, = tools {times.tools_s:.3g} s,"
        f" . waiting {times.waiting_s:.3g} s"
    )
    return ("    time       [", "dim"), *(_BAR[kind] for kind in _kinds_of_bar(times)), (seconds, "dim")


def cut_text(text: str, limits: TextLimits) -> tuple[str, int]:
    """Return the beginning of a text within the limits, and the number of characters that were cut."""
    head = "\n".join(text[: limits.characters].split("\n")[: limits.lines])
    return head, len(text) - len(head)


def called(call: ToolUse) -> str:
    """Return a tool call as text."""
    return f"{call.name} {call.arguments}".strip() or "a call that cannot be read"


def _kinds_of_bar(times: RolloutTimes) -> list[str]:
    """Return the activity (`generation`, `tools` or `waiting`) for each character of a bar of times.

    A short span takes at least one character.
    """
    kinds = ["waiting"] * _BAR_WIDTH
    for name, spans in (("generation", times.generation), ("tools", times.tools)):
        for start, end in spans:
            if end <= start:
                continue
            scale = _BAR_WIDTH / times.seconds if times.seconds else 0.0
            first = min(int(start * scale), _BAR_WIDTH - 1)
            last = min(max(round(end * scale), first + 1), _BAR_WIDTH)
            kinds[first:last] = [name] * (last - first)
    return kinds


def _turn_lines(turn: ConversationTurn, limits: TextLimits) -> Iterator[Line]:
    mark = TRAINED if turn.is_trained else SAMPLED if turn.is_sampled else " "
    style = _STYLES.get(mark) or _STYLES.get(turn.role, "")
    role = _on_one_line(f"{turn.role} {turn.name}".strip())
    head, num_hidden = cut_text(turn.text, limits)
    unread = f"  [{UNREAD}]" if turn.sequence is None else ""
    hidden = f"  [+{num_hidden:,} characters]" if num_hidden else ""
    first, *others = head.split("\n")
    margin = ((f"  {mark} ", f"bold {style}".strip()),)
    yield (*margin, (f"{role:{_ROLE_WIDTH - 1}} ", f"bold {style}".strip()), (first, style)) + (
        () if others else ((hidden + unread, "dim"),)
    )
    for number, line in enumerate(others, 1):
        end = ((hidden + unread, "dim"),) if number == len(others) else ()
        yield (*margin, (" " * _ROLE_WIDTH, ""), (line, style), *end)
    for call in turn.calls:
        text, more = cut_text(called(call).replace("\n", "\\n"), limits)
        outcome = "red" if call.outcome in FAILED_OUTCOMES else "dim"
        cut = f" [+{more:,} characters]" if more else ""
        yield (("      call     ", "dim"), (f"{text}{cut}", "magenta"), (f"  {call.outcome}", outcome))


def _on_one_line(text: str) -> str:
    one_line = text.replace("\n", "\\n")
    return one_line if len(one_line) <= LONGEST_ON_ONE_LINE else f"{one_line[:LONGEST_ON_ONE_LINE]} [...]"
