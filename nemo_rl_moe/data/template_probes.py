# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversations that show how a chat template writes turns, calls and thinking."""

from nemo_rl_moe.data.messages import Message

PROBED = PROBE_NAME, PROBE_KEY, PROBE_VALUE = "probe_tool", "probe_key", "probe_value"
PROBE_TOOL = {
    "type": "function",
    "function": {"name": PROBE_NAME, "description": "a", "parameters": {"type": "object", "properties": {}}},
}
PROBE_TURNS: tuple[Message, ...] = (
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            # Some templates require ids of nine letters and digits.
            {
                "id": "abcdefghi",
                "type": "function",
                "function": {"name": PROBE_NAME, "arguments": {PROBE_KEY: PROBE_VALUE}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "abcdefghi", "name": PROBE_NAME, "content": "b"},
)


PROBE_SYSTEM: Message = {"role": "system", "content": "c d"}
PROBE_QUESTION, PROBE_CALL, PROBE_RESULT = PROBE_TURNS
PROBE_ANSWER: Message = {"role": "assistant", "content": "e f"}
PROBE_REASON = "probe_reason"
PROBE_THOUGHT: Message = {"role": "assistant", "content": f"<think>\n{PROBE_REASON}\n</think>\n\nh"}
PROBE_SHORT: Message = {"role": "assistant", "content": PROBE_VALUE}
PROBE_REASONED: Message = {**PROBE_SHORT, "reasoning_content": PROBE_REASON}
PROBE_CALLS: Message = {**PROBE_CALL, "tool_calls": PROBE_CALL["tool_calls"] * 2}
PROBES: tuple[tuple[Message, ...], ...] = (
    (PROBE_SYSTEM, PROBE_QUESTION),
    (PROBE_SYSTEM, PROBE_QUESTION, PROBE_ANSWER, PROBE_QUESTION),
    (PROBE_QUESTION, PROBE_ANSWER, {"role": "user", "content": " i\n"}, PROBE_ANSWER),
    (PROBE_QUESTION, PROBE_THOUGHT, {"role": "user", "content": "j"}, PROBE_ANSWER),
    (PROBE_QUESTION, PROBE_CALL, PROBE_RESULT),
    (PROBE_QUESTION, PROBE_CALLS, PROBE_RESULT, PROBE_RESULT, PROBE_ANSWER),
)
"""Conversations that distinguish published templates. A conversation that ends with a question or a result is a
prompt."""
