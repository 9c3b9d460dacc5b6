# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The environment of a run with tools: the model calls tools until it answers."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal

from nemo_rl_moe.config.environments.tools import ToolsConfig
from nemo_rl_moe.config.suggestions import did_you_mean, nearest, shortened
from nemo_rl_moe.data.thinking import THINK_START
from nemo_rl_moe.data.turn_glue import NoExtension
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.runs.folder.conversations import Outcome, ToolUse, as_arguments
from nemo_rl_moe.tools.arguments import ArgumentError, checked_arguments
from nemo_rl_moe.tools.definitions import Tools
from nemo_rl_moe.tools.formats.interface import MalformedCall, ParsedCall, ToolCall, ToolFormat
from nemo_rl_moe.tools.formats.typed_values import properties_of
from nemo_rl_moe.tools.results import CallTool, cut, error_text

OpenCalls = Callable[[Mapping[str, Any]], AbstractAsyncContextManager[CallTool]]
"""Returns the context in which a trajectory calls tools, from the record of its prompt."""
CALLS, WRONG_CALLS, FAILED_CALLS = "tools/calls", "tools/wrong_calls", "tools/failed_calls"
RESULTS_CUT, SECONDS = "tools/cut_results", "tools/seconds"
UNKNOWN_CALLS = "tools/unknown_calls"
"""Metric: number of calls without a result, only in environments of other libraries."""
METRICS = (CALLS, WRONG_CALLS, FAILED_CALLS, RESULTS_CUT, SECONDS)
_OUTCOMES: dict[Fault, Outcome] = {Fault.ERROR: "error", Fault.TIMEOUT: "timeout", Fault.DIED: "died"}
NO_TOOL = "unknown"
"""Name of the tool in the answer to a call of an unknown tool."""


@dataclass
class _Calls:
    """Calls of a trajectory so far. Their metrics are stored in the session, so that a failed trajectory has metrics.

    Attributes:
        tools: Tools that the trajectory may call.
        turn_s: Seconds that the calls of this turn have taken.
    """

    session: Session
    tools: Tools
    call: CallTool
    turn_s: float = 0.0

    def __post_init__(self) -> None:
        self.session.metrics.update(dict.fromkeys(METRICS, 0.0))

    def count(self, name: str, number: float = 1.0) -> None:
        self.session.metrics[name] += number


class ToolConversation:
    """A conversation in which the model calls tools, and ends with a response without calls.

    The calls of a turn are made one after the other. A malformed, unknown or late call gets an error message as its
    answer, and the conversation continues.

    Args:
        tools: Tools of the run. A prompt whose record names tools may only call the named ones.
        tool_format: Format in which the model writes calls.
        driver: Limits on calls, the maximum number of responses, and the cost of a call. Calls in the last allowed
            response are not made and cost nothing.
        warn: Receives a line at the first failure of each kind.
    """

    def __init__(
        self,
        tools: Tools,
        tool_format: ToolFormat,
        open_calls: OpenCalls,
        driver: ToolsConfig,
        warn: Callable[[str], None],
    ):
        self._tools, self._format, self._open_calls = tools, tool_format, open_calls
        self._limits, self._max_turns, self._call_cost = driver.limits, driver.max_turns, driver.call_cost
        self._warn, self._reported = warn, set[Fault]()
        self._schemas = {name: properties_of(tool.definition["function"]["parameters"]) for name, tool in tools.items()}

    async def rollout(self, session: Session) -> Trajectory:
        """Return one trajectory. The reward function scores its last response."""
        async with self._open_calls(session.prompt.record) as call:
            return await self._conversed(session, call)

    async def _conversed(self, session: Session, call: CallTool) -> Trajectory:
        names = session.prompt.inputs.tool_names
        made = _Calls(session, self._tools if names is None else {name: self._tools[name] for name in names}, call)
        truncated_by: Literal["turns"] | None = None
        while session.has_room:
            begins_in_thinking = session.ends_in(THINK_START)
            turn = await session.generate()
            if turn.is_truncated:
                break
            calls = self._format.calls(turn.text, self._schemas, begins_in_thinking=begins_in_thinking)
            if not calls:
                break
            if len(session.turns) == self._max_turns:
                truncated_by = "turns"
                break
            answers = await self._answers(calls, made)
            try:
                session.append_messages(answers)
            except NoExtension as error:
                return session.failed(Fault.ERROR, str(error))
        score = await session.score()
        if score.fault is None:
            score = replace(score, reward=score.reward - self._call_cost * session.metrics[CALLS])
        return session.finish(score, truncated_by=truncated_by)

    async def _answers(self, calls: Sequence[ParsedCall], made: _Calls) -> list[dict[str, object]]:
        """Make the calls of a turn, and return the messages that answer them."""
        made.turn_s = 0.0
        messages: list[dict[str, object]] = []
        for call in calls:
            call_id = f"call{int(made.session.metrics[CALLS]) % 100_000:05}"  # some templates want nine characters
            # The model's text for a name may contain a control token, so that an unknown name is not repeated.
            messages.append(
                {
                    "role": "tool",
                    "name": call.name if isinstance(call, ToolCall) and call.name in made.tools else NO_TOOL,
                    "tool_call_id": call_id,
                    "content": await self._answer(call, made, call_id),
                }
            )
            made.count(CALLS)
        return messages

    async def _answer(self, call: ParsedCall, made: _Calls, call_id: str) -> str:
        """Make a call, note it, and return the text for the model."""

        def note(outcome: Outcome, seconds: float = 0.0) -> None:
            written = ("", "") if isinstance(call, MalformedCall) else (call.name, as_arguments(call.arguments))
            made.session.note_call(ToolUse(call_id, *written, outcome), seconds)

        try:
            name, arguments = self._checked(call, made.tools)
        except ArgumentError as error:
            made.count(WRONG_CALLS)
            note("wrong")
            return cut(error_text(str(error)), self._limits.max_result_characters)[0]
        left_s = self._limits.turn_timeout_s - made.turn_s
        if left_s <= 0:
            made.count(FAILED_CALLS)
            note("not_called")
            return error_text(f"not called: the calls of this turn have taken {self._limits.turn_timeout_s:g} s")
        result = await made.call(name, arguments, min(self._limits.call_timeout_s, left_s))
        made.turn_s += result.seconds
        made.count(SECONDS, result.seconds)
        made.count(RESULTS_CUT, result.is_cut)
        if result.is_wrong:
            made.count(WRONG_CALLS)
            note("wrong", result.seconds)
        elif result.fault is None:
            note("cut" if result.is_cut else "ok", result.seconds)
        else:
            note(_OUTCOMES[result.fault], result.seconds)
            made.count(FAILED_CALLS)
            self._report_first_of_its_kind(name, result.fault, result.text)
        return result.text

    def _report_first_of_its_kind(self, name: str, fault: Fault, text: str) -> None:
        if fault not in self._reported:
            self._reported.add(fault)
            self._warn(
                f"a call of the tool {name} failed, and the model reads {text.splitlines()[0]!r}; further ones are"
                f" counted as {FAILED_CALLS}"
            )

    def _checked(self, call: ParsedCall, tools: Tools) -> tuple[str, dict[str, object]]:
        """Return the name and the converted arguments of a call. Raise an ArgumentError if the call cannot be made."""
        if isinstance(call, MalformedCall):
            raise ArgumentError(f"this call cannot be read: {call.problem}; expected the form {self._format.example}")
        tool = tools.get(call.name)
        if tool is None:
            usages = ", ".join(each.usage for each in tools.values())
            hint = did_you_mean(nearest(call.name, tools))
            raise ArgumentError(f"there is no tool {shortened(call.name)!r}{hint}; expected one of {usages}")
        return call.name, checked_arguments(call.arguments, tool.parameters, tool.usage)
