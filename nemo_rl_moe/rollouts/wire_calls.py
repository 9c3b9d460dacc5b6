# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Outcomes of tool calls that a user's program makes, from the messages that it sends back.

These calls do not run here. A message of role tool shows that a call has a result, and its text may show an error.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from nemo_rl_moe.data.messages import content_text
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.runs.folder.conversations import FAILED_OUTCOMES, UNKNOWN, Outcome, ToolUse, as_arguments
from nemo_rl_moe.tools.formats.interface import ToolCall

_ERROR_TEXT = re.compile(
    r"\s*(error:|error (executing|calling|running) [^\n:]{0,100}:|[\w.]+(error|exception):|an error occurred"
    r"|traceback \(most recent call last\))",
    re.IGNORECASE,
)
_ERROR_KEYS = ("error", "is_error", "isError")


def outcome_of_result(text: str) -> Outcome:
    """Return "error" if the text of a result looks like an error, otherwise "answered"."""
    if _ERROR_TEXT.match(text):
        return "error"
    if text.lstrip().startswith("{"):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return "answered"
        if any(found.get(key) for key in _ERROR_KEYS):
            return "error"
    return "answered"


@dataclass(frozen=True)
class CallMetrics:
    """Names of the metrics that count calls.

    Attributes:
        made: Calls of the model that the user's program has received.
        wrong: Malformed calls.
        failed: Calls whose results show an error.
        unknown: Calls without a result.
    """

    made: str
    wrong: str
    failed: str
    unknown: str

    def __iter__(self) -> Iterator[str]:
        return iter((self.made, self.wrong, self.failed, self.unknown))


class WireCalls:
    """Record of the tool calls of one trajectory, and of the messages that bring their results.

    Args:
        session: Session to which the calls and their metrics are added.
        names: Names of the metrics.
        failures: Texts of results that are known to be errors. The caller may add further ones later.
    """

    def __init__(self, session: Session, names: CallMetrics, failures: Collection[str] = ()):
        self._session, self._names, self._failures = session, names, failures
        self._open: set[str] = set()
        session.metrics.update(dict.fromkeys(names, 0.0))

    def note(self, calls: Iterable[tuple[str, ToolCall]], num_malformed: int) -> None:
        """Record the calls in the last response, each with its id."""
        for call_id, call in calls:
            self._session.note_call(ToolUse(call_id, call.name, as_arguments(call.arguments), UNKNOWN))
            self._open.add(call_id)
            self._count(self._names.made)
            self._count(self._names.unknown)
        for _ in range(num_malformed):
            self._session.note_call(ToolUse("", "", "", "wrong"))
            self._count(self._names.wrong)

    def note_results(self, messages: Iterable[Mapping[str, object]]) -> None:
        """Record the results of earlier calls, as far as messages of role tool contain them."""
        for message in messages:
            call_id = message.get("tool_call_id")
            if message.get("role") != "tool" or not isinstance(call_id, str) or call_id not in self._open:
                continue
            self._open.remove(call_id)
            self._count(self._names.unknown, -1.0)
            content = message.get("content")
            text = content_text(content if isinstance(content, str | list) else None)
            outcome: Outcome = "error" if text in self._failures else outcome_of_result(text)
            if outcome in FAILED_OUTCOMES:
                self._count(self._names.failed)
            self._session.note_result(call_id, outcome)

    def _count(self, name: str, number: float = 1.0) -> None:
        self._session.metrics[name] += number
