# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The verifiers library's client of a model, whose responses a session samples."""

import json
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from verifiers.clients import Client
from verifiers.errors import OverlongPromptError
from verifiers.types import Response, ResponseMessage, ToolCall, Usage

from nemo_rl_moe.data.messages import Message
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.libraries.message_history import MessageHistory, TrajectoryFull
from nemo_rl_moe.rollouts.tool_environment import CALLS, FAILED_CALLS, NO_TOOL, UNKNOWN_CALLS, WRONG_CALLS
from nemo_rl_moe.rollouts.turn import Turn
from nemo_rl_moe.rollouts.wire_calls import CallMetrics, WireCalls
from nemo_rl_moe.tools.formats.interface import ToolCall as WrittenCall
from nemo_rl_moe.tools.formats.interface import ToolFormat
from nemo_rl_moe.tools.formats.typed_values import properties_of

CALL_METRICS = CallMetrics(CALLS, WRONG_CALLS, FAILED_CALLS, UNKNOWN_CALLS)


class SessionClient(Client):
    """Client of one trajectory. It ignores the sampling arguments of the environment.

    Args:
        tool_format: Format in which the model writes calls. None if the environment has no tools.
        failures: Texts of failed calls. The environment adds texts during the trajectory.
    """

    def __init__(self, session: Session, tool_format: ToolFormat | None, failures: Collection[str]):
        super().__init__(session)
        self._session, self._format = session, tool_format
        self._history = MessageHistory(session)
        self._names: dict[str, str] = {}
        self._wire = None if tool_format is None else WireCalls(session, CALL_METRICS, failures)

    async def get_response(
        self,
        prompt: Sequence[Any],
        model: str,
        sampling_args: Mapping[str, Any],
        tools: Sequence[Any] | None = None,
        **options: Any,
    ) -> Response:
        """Return the model's response to messages.

        Raises:
            OverlongPromptError: The messages do not fit.
        """
        messages = [self._as_message(message) for message in prompt]
        if self._wire is not None:
            self._wire.note_results(messages)
        try:
            turn = await self._history.respond(messages)
        except TrajectoryFull:
            raise OverlongPromptError from None
        calls = self._calls(turn, tools or ())
        content = {"role": "assistant", "content": turn.text}
        self._history.note_response(
            {**content, "tool_calls": [{"name": each.name, "arguments": each.arguments} for each in calls]}
        )
        size = len(turn.token_ids)
        return Response(
            id=f"{self._session.prompt.sample_id}-{len(self._session.turns)}",
            created=int(time.time()),
            model=model,
            usage=Usage(
                prompt_tokens=self._session.num_tokens - size,
                reasoning_tokens=0,
                completion_tokens=size,
                total_tokens=self._session.num_tokens,
            ),
            message=ResponseMessage(
                **content,
                tool_calls=calls or None,
                finish_reason="length" if turn.is_truncated else "tool_calls" if calls else "stop",
                is_truncated=turn.is_truncated,
            ),
        )

    def note_end(self, messages: Sequence[Any]) -> None:
        """Record results of tool calls that follow the last response in the final conversation of the environment."""
        if self._wire is not None:
            self._wire.note_results(map(_as_mapping, messages))

    # These methods are abstract in the base class. Only its `get_response` calls them, and that method is overridden
    # above.
    def setup_client(self, config: Any) -> Any:
        raise NotImplementedError

    async def to_native_tool(self, tool: Any) -> Any:
        raise NotImplementedError

    async def to_native_prompt(self, messages: Any) -> Any:
        raise NotImplementedError

    async def get_native_response(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError

    async def raise_from_native_response(self, response: Any) -> None:
        raise NotImplementedError

    async def from_native_response(self, response: Any) -> Any:
        raise NotImplementedError

    async def close(self) -> None:
        """Do nothing: the session belongs to the run."""

    def _calls(self, turn: Turn, tools: Sequence[Any]) -> list[ToolCall]:
        """Return the well-formed calls in a response. Malformed calls are dropped, as by model servers."""
        if self._format is None or self._wire is None or not tools:
            return []
        schemas = {tool.name: properties_of(tool.parameters) for tool in tools}
        found = self._format.calls(turn.text, schemas, begins_in_thinking=self._history.begins_in_thinking)
        calls: dict[str, WrittenCall] = {}
        for call in found:
            if isinstance(call, WrittenCall):
                call_id = f"call{len(self._names) % 100_000:05}"  # some templates want nine characters
                self._names[call_id] = call.name
                calls[call_id] = call
        self._wire.note(calls.items(), len(found) - len(calls))
        return [
            ToolCall(id=call_id, name=call.name, arguments=json.dumps(dict(call.arguments)))
            for call_id, call in calls.items()
        ]

    def _as_message(self, message: Any) -> Message:
        given = _as_mapping(message)
        made: Message = {"role": given["role"], "content": given.get("content", "")}
        if calls := given.get("tool_calls"):
            made["tool_calls"] = [
                {"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
                for call in calls
            ]
        if (call_id := given.get("tool_call_id")) is not None:
            made |= {"tool_call_id": call_id, "name": self._names.get(call_id, NO_TOOL)}
        return made


def _as_mapping(message: Any) -> Mapping[str, Any]:
    """Return the fields of the library's message, which is a mapping or a pydantic model."""
    fields: Mapping[str, Any] = message if isinstance(message, Mapping) else message.model_dump(exclude_none=True)
    return fields
