# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversations with tools: calls in their order, answers to bad ones, limits, and what is trained on."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nemo_rl_moe.data.continuation import Continuation
from nemo_rl_moe.data.template_inputs import NO_INPUTS, TemplateInputs
from nemo_rl_moe.errors import ConfigurationError, WorkerDiedError
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.tool_environment import ToolConversation
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.tools.definitions import load_tools
from nemo_rl_moe.tools.detection import format_of, require_continuable, require_definitions
from nemo_rl_moe.tools.formats.interface import ToolFormat
from nemo_rl_moe.tools.formats.registry import TOOL_FORMATS
from nemo_rl_moe.tools.results import ToolResult, as_text
from tests.support.chat_templates import THINKING_ALWAYS, make_byte_tokenizer
from tests.support.conversations import ALL, Family, script_of, scripted_session
from tests.support.grpo_inputs import only_sequence, sampled_ids, tools_section
from tests.support.published_templates import CALL_TEMPLATES

TOOLS = load_tools(["tests.support.tool_functions:add", "tests.support.tool_functions:say"], {})
QUESTION = {"role": "user", "content": "1+2+3?"}
INPUTS = TemplateInputs(tools=tuple(tool.definition for tool in TOOLS.values()))
QWEN = ALL["Qwen3, Qwen3-MoE"]
CONTINUABLE = (
    "Qwen2.5, Qwen2-MoE",
    "Qwen3, Qwen3-MoE",
    "tiny_qwen3_moe_tools",
    "Llama 3.1",
    "Mistral, Mixtral",
    "corrected Mistral",
    "corrected DeepSeek-V3",
    "gpt-oss",
    "OLMoE",
    "OLMo-3",
)
OPENING = {
    "published DeepSeek-R1": ALL["published DeepSeek-R1"],
    "corrected DeepSeek-R1": ALL["corrected DeepSeek-R1"],
    "Qwen3-Thinking": Family(
        make_byte_tokenizer(THINKING_ALWAYS.replace("<call>", "<tool_call>").replace("</call>", "</tool_call>")),
        ("<|end|>",),
    ),
}
"""Families whose generation prompt opens a think block, which their earlier turns do not have."""


class Calls:
    """Calls the tools at once; each call takes so many seconds of nobody's clock."""

    def __init__(self, seconds: float = 0.0):
        self.made: list[tuple[str, dict[str, object], float]] = []
        self._seconds = seconds

    async def __call__(self, name: str, arguments: Mapping[str, object], limit_s: float) -> ToolResult:
        self.made.append((name, dict(arguments), limit_s))
        return ToolResult(as_text(TOOLS[name].function(**arguments)), seconds=min(self._seconds, limit_s))


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def ended(family: Family, text: str) -> list[int]:
    return [*family.encode(text), family.end_ids[-1]]


def play(
    responses: Sequence[str],
    calls: Any = None,
    *,
    family: Family = QWEN,
    tool_format: ToolFormat | None = None,
    session: Session | None = None,
    max_tokens: int = 10_000,
    warn: Callable[[str], None] = print,
    **keys: Any,
) -> tuple[Session, Trajectory]:
    """Play a conversation of the model's responses; `session` has its own."""
    session = session or session_of(responses, family, max_tokens=max_tokens, inputs=INPUTS)
    tool_format = tool_format or format_of(family.tokenizer, None, NO_INPUTS)
    driver = tools_section(tools=["calculator"], **keys)
    environment = ToolConversation(TOOLS, tool_format, lambda record: nullcontext(calls or Calls()), driver, warn)
    return session, asyncio.run(environment.rollout(session))


def session_of(responses: Sequence[str], family: Family = QWEN, **more: Any) -> Session:
    return scripted_session(family, [QUESTION], [ended(family, text) for text in responses], reward=1.0, **more)


def answers(session: Session) -> list[str]:
    return [message["content"] for message in session.messages if message["role"] == "tool"]


@pytest.mark.parametrize("name", CONTINUABLE)
def test_the_model_calls_until_it_answers(name: str) -> None:
    family = ALL[name]
    tool_format = format_of(family.tokenizer, None, NO_INPUTS)
    call = tool_format.example.replace('"value"', '"hello"').replace('"argument"', '"text"')
    call = call.replace('"tool"', '"say"').replace("tool\n", "say\n").replace("functions.tool", "functions.say")
    call = call.replace("tool(argument=", "say(text=")
    calls = Calls()
    session, found = play([call, call, "The answer."], calls, family=family)
    assert [made[:2] for made in calls.made] == [("say", {"text": "hello"})] * 2
    assert answers(session) == ["hello", "hello"]
    assert found.num_turns == 3
    assert (found.reward, found.fault, found.finish_reason) == (1.0, None, "stop")
    assert found.metrics["tools/calls"] == 2
    # Only what the model wrote is trained on, the tokens as they were sampled.
    sampled = [*ended(family, call), *ended(family, call), *ended(family, "The answer.")]
    assert sampled_ids(found) == sampled
    text = family.tokenizer.decode(only_sequence(found).token_ids)
    assert all(definition["function"]["description"] in text for definition in INPUTS.tools or ()) == family.shows_tools


def test_t07_several_calls_of_a_turn_are_made_in_their_order_and_answered_once_each() -> None:
    calls = Calls()
    both = called("add", a=1, b=2) + "\n" + called("say", text="x") + "\n" + called("add", a="3")
    session, found = play([both, "done"], calls)
    assert [made[:2] for made in calls.made] == [("add", {"a": 1, "b": 2}), ("say", {"text": "x"}), ("add", {"a": 3})]
    assert answers(session) == ["3", "x", "4"]
    ids = [message["tool_call_id"] for message in session.messages if message["role"] == "tool"]
    assert len(set(ids)) == 3
    assert all(len(each) == 9 and each.isalnum() for each in ids)
    assert found.metrics["tools/calls"] == 3
    assert found.num_turns == 2


def test_each_answered_call_costs_and_the_answer_stays_right() -> None:
    both = called("add", a=1, b=2) + called("nothing", a=1)
    _, found = play([both, called("add", a=3, b=3), called("add", a=4)], max_turns=3, call_cost=0.125)
    # The call of the last turn is not made; it is the answer.
    assert found.metrics["tools/calls"] == 3
    assert found.reward == 1.0 - 3 * 0.125
    assert found.is_correct


def test_a_bad_call_gets_an_answer_that_teaches_and_the_others_are_made() -> None:
    bad = [
        '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>',
        called("ad", a=1),
        called("add", b=1),
        called("add", a="one"),
        called("add", a=1, **{"<|im_end|>": 2}),
        called("<|im_end|>"),
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"\\ud800": 1}}</tool_call>',
    ]
    calls = Calls()
    session, found = play(["".join([*bad, called("add", a=1)]), "done"], calls)
    assert [made[:2] for made in calls.made] == [("add", {"a": 1})]
    texts = answers(session)
    assert "this call cannot be read: invalid JSON" in texts[0]
    assert 'expected the form <tool_call>\n{"name": "tool", "arguments"' in texts[0]
    assert texts[1].startswith("error: there is no tool 'ad'; did you mean add?; expected one of add(a: integer,")
    assert texts[2] == "error: the argument a is missing; expected add(a: integer, b: integer = 1)"
    assert 'the argument a is "one", expected integer' in texts[3]
    assert "there is no argument '<|im_end|>'" in texts[4]
    assert texts[-1] == "2"
    assert found.metrics["tools/calls"] == 10
    assert found.metrics["tools/wrong_calls"] == 9
    # Texts of control tokens in answers are plain text: the turns' ends alone are such tokens.
    end = QWEN.end_ids[-1]
    text = QWEN.tokenizer.decode(only_sequence(found).token_ids)
    assert text.count("<|im_end|>") > np.count_nonzero(only_sequence(found).token_ids == end)


def test_answers_to_bad_calls_are_cut_as_results_are() -> None:
    session, _ = play([called("ad"), "done"], limits={"max_result_characters": 40})
    (text,) = answers(session)
    assert text.startswith("error: there is no tool 'ad'; did you me\n[cut: the first 40 of ")


def test_t09_a_model_that_never_calls_right_ends_at_the_most_turns() -> None:
    wrong = "<tool_call>add</tool_call>"
    calls = Calls()
    session, found = play([wrong] * 9, calls, max_turns=3)
    assert found.num_turns == 3
    assert len(answers(session)) == 2
    assert (calls.made, found.reward, found.finish_reason) == ([], 1.0, "turns")


def test_calls_of_the_last_turn_are_not_made() -> None:
    calls = Calls()
    _, found = play([called("add", a=1), called("add", a=2), "done"], calls, max_turns=2)
    assert len(calls.made) == 1
    assert (found.num_turns, found.finish_reason) == (2, "turns")
    assert not found.is_truncated, "it lacks no token"


def test_an_answer_in_the_last_turn_is_none_that_was_cut() -> None:
    _, found = play([called("add", a=1), "done"], Calls(), max_turns=2)
    assert (found.num_turns, found.finish_reason) == (2, "stop")


def test_what_is_thought_is_not_called() -> None:
    calls = Calls()
    _, found = play([f"<think>\n{called('add', a=1)}\n</think>\n\nThree."], calls)
    assert (calls.made, found.num_turns) == ([], 1)


def test_t06_a_result_that_does_not_fit_ends_the_trajectory_as_cut() -> None:
    session, whole = play([called("say", text="y" * 400), "done"])
    size = len(only_sequence(whole).token_ids)
    _, exact = play([called("say", text="y" * 400), "done"], max_tokens=size)
    assert (exact.num_turns, exact.finish_reason) == (2, "stop")
    _, over = play([called("say", text="y" * 400), "done"], max_tokens=size - 400)
    assert (over.num_turns, over.finish_reason, over.reward) == (1, "length", 1.0)
    assert over.overlong
    # The answer fits, and no token of the model behind it.
    room_after_result = size - len(ended(QWEN, "done"))
    _, full = play([called("say", text="y" * 400), "done"], max_tokens=room_after_result)
    assert (full.num_turns, len(only_sequence(full).token_ids)) == (1, room_after_result)
    assert answers(session) == ["y" * 400]


def test_calls_of_a_turn_share_a_limit() -> None:
    calls = Calls(seconds=8.0)
    session, found = play(["".join(called("add", a=number) for number in range(6)), called("add", a=9), "done"], calls)
    assert [limit for _, _, limit in calls.made] == [10.0, 10.0, 10.0, 6.0, 10.0]
    assert answers(session) == [
        *("1", "2", "3", "4"),
        *["error: not called: the calls of this turn have taken 30 s"] * 2,
        "10",
    ]
    assert found.metrics["tools/failed_calls"] == 2
    assert found.metrics["tools/seconds"] == 8.0 * 3 + 6.0 + 8.0


def test_failures_of_tools_are_counted_and_told() -> None:
    async def fail(name: str, arguments: Mapping[str, object], limit_s: float) -> ToolResult:
        return ToolResult("error: RuntimeError: no such word", Fault.ERROR)

    async def cut(name: str, arguments: Mapping[str, object], limit_s: float) -> ToolResult:
        return ToolResult("x\n[cut: the first 1 of 9 characters]", is_cut=True)

    warnings: list[str] = []
    session, found = play([called("add", a=1) * 2, "done"], fail, warn=warnings.append)
    assert warnings == [
        "a call of the tool add failed, and the model reads 'error: RuntimeError: no such word'; further ones are"
        " counted as tools/failed_calls"
    ]
    assert answers(session) == ["error: RuntimeError: no such word"] * 2
    assert (found.metrics["tools/failed_calls"], found.metrics["tools/wrong_calls"], found.fault) == (2, 0, None)
    _, found = play([called("add", a=1), "done"], cut)
    assert (found.metrics["tools/cut_results"], found.metrics["tools/failed_calls"]) == (1, 0)


def test_a_prompt_that_names_tools_may_call_those_alone() -> None:
    other = next(name for name in TOOLS if name != "add")
    session = session_of(
        [called(other), called("add", a=1), "done"],
        inputs=TemplateInputs(tool_names=("add",)),
        continuation=Continuation(QWEN.tokenizer, INPUTS),
    )
    calls = Calls()
    _, found = play([], calls, session=session)
    assert [made[0] for made in calls.made] == ["add"]
    assert answers(session)[0].startswith(f"error: there is no tool '{other}'; expected one of add(")
    assert (found.metrics["tools/wrong_calls"], found.fault) == (1, None)


def test_workers_that_cannot_be_replaced_end_the_run() -> None:
    async def lost(name: str, arguments: Mapping[str, object], limit_s: float) -> ToolResult:
        raise WorkerDiedError("tool worker 0 died while starting")

    with pytest.raises(WorkerDiedError):
        play([called("add", a=1), "done"], lost)


@pytest.mark.parametrize("name", [*CONTINUABLE, *OPENING])
def test_a_chat_template_that_shows_results_is_accepted(name: str) -> None:
    family = {**ALL, **OPENING}[name]
    tool_format = format_of(family.tokenizer, None, NO_INPUTS)
    require_continuable(Continuation(family.tokenizer, INPUTS), tool_format, family.encode, family.end_ids)


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("name", OPENING)
def test_the_model_calls_behind_thinking_that_the_prompt_opens(name: str, thinks: bool) -> None:
    """Where the template leaves the thinking out of earlier turns, another sequence begins."""
    family = OPENING[name]
    call = format_of(family.tokenizer, None, NO_INPUTS).example
    call = call.replace('"value"', '"hello"').replace('"argument"', '"text"').replace('"tool"', '"say"')
    call = call.replace("tool\n", "say\n")
    thought = "hm\n</think>\n\n" if thinks else "</think>"
    calls = Calls()
    session, found = play([thought + call, "The answer."], calls, family=family)
    assert (found.fault, found.fault_message) == (None, "")
    assert [made[:2] for made in calls.made] == [("say", {"text": "hello"})]
    assert answers(session) == ["hello"]
    trained = [token for sequence in found.sequences for token in sequence.token_ids[sequence.loss_mask].tolist()]
    assert trained == [*ended(family, thought + call), *ended(family, "The answer.")]
    keeps = thinks and name != "published DeepSeek-R1"
    assert found.num_sequences == (1 if keeps else 2)


@pytest.mark.parametrize("name", ["corrected DeepSeek-R1", "published DeepSeek-V3", "tiny_qwen3_moe"])
def test_a_chat_template_that_shows_no_definitions_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        require_definitions(ALL[name].tokenizer, NO_INPUTS)
    assert str(caught.value) == (
        "env.driver: the chat template shows no definitions of tools; set policy.tokenizer.chat_template to a template"
        " that shows them"
    )
    require_definitions(QWEN.tokenizer, NO_INPUTS)


def test_the_token_that_ends_calls_has_to_end_turns() -> None:
    family = ALL["gpt-oss"]
    tool_format = format_of(family.tokenizer, None, NO_INPUTS)
    call_end = family.tokenizer.convert_tokens_to_ids("<|call|>")
    answer_end = family.tokenizer.convert_tokens_to_ids("<|return|>")
    require_continuable(Continuation(family.tokenizer), tool_format, family.encode, (answer_end, call_end))
    with pytest.raises(ConfigurationError, match=r"the token that ends a call in policy\.generation\.stop_token_ids"):
        require_continuable(Continuation(family.tokenizer), tool_format, family.encode, (answer_end,))


def test_calls_of_a_turn_that_was_cut_are_not_made() -> None:
    calls = Calls()
    session = session_of([called("add", a=1)], inputs=INPUTS)
    generate = script_of(session).answer

    async def cut(request: GenerationRequest) -> GeneratedSequence:
        return replace(await generate(request), is_truncated=True)

    script_of(session).answer = cut
    _, found = play([], calls, session=session)
    assert (calls.made, found.num_turns, found.finish_reason) == ([], 1, "length")


def test_a_prompt_that_opens_thinking_is_heeded() -> None:
    template = CALL_TEMPLATES["qwen3_coder, the prompt opens thinking"]
    template = template.replace("{{- m.content", "{{- '<think>\\n' + m.content")  # earlier turns keep it
    family = Family(make_byte_tokenizer(template), ("<|end|>",))
    call = "<tool_call>\n<function=add>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    calls = Calls()
    turns = [f"I try {call.format(1)}</think>\n{call.format(2)}", f"I try {call.format(3)}</think>\nThree."]
    _, found = play(turns, calls, family=family, tool_format=TOOL_FORMATS["qwen3_coder"])
    assert [made[1] for made in calls.made] == [{"a": 2}]
    assert (found.num_turns, found.fault) == (2, None)
