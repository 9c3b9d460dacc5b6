# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Formats of calls: what a chat template writes is read back, and whatever else a model writes is no error."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from nemo_rl_moe.data.chat_template import text_renderer_for
from nemo_rl_moe.data.template_inputs import NO_INPUTS, TemplateInputs
from nemo_rl_moe.data.turn_spans import RenderError
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.tools.detection import calls_line, format_of
from nemo_rl_moe.tools.formats import vllm_parsers
from nemo_rl_moe.tools.formats.interface import MalformedCall, ToolCall, ToolFormat
from nemo_rl_moe.tools.formats.registry import TOOL_FORMATS
from nemo_rl_moe.tools.formats.scanning import MOST_MALFORMED
from tests.support.chat_templates import make_byte_tokenizer
from tests.support.conversations import ALL
from tests.support.published_templates import CALL_TEMPLATES
from tests.support.quick_list import examples, some_of

SCHEMA = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "is_on": {"type": "boolean"},
    "places": {"type": "array", "items": {"type": "integer"}},
    "options": {"type": "object"},
    "note": {"type": "string", "nullable": True},
}
SCHEMAS = {"look_up": SCHEMA, "add": SCHEMA}
DEFINITIONS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}}
    for name in SCHEMAS
]
FORMAT_OF_FAMILY = {
    "Qwen2.5, Qwen2-MoE": "hermes",
    "Qwen3, Qwen3-MoE": "hermes",
    "tiny_qwen3_moe_tools": "hermes",
    "Llama 3.1": "llama3_json",
    "Mistral, Mixtral": "mistral",
    "corrected Mistral": "mistral",
    "published Mistral without blanks": "mistral",
    "corrected DeepSeek-V3": "deepseek_v3",
    "published DeepSeek-V3": "deepseek_v3",
    "corrected DeepSeek-R1": "deepseek_v3",
    "published DeepSeek-R1": "deepseek_v3",
    "gpt-oss": "harmony",
    "OLMoE": "function_calls",
    "OLMo-3": "olmo3",
}
TOKENIZERS: dict[str, tuple[str, PreTrainedTokenizerBase]] = {
    **{name: (name.partition(",")[0], make_byte_tokenizer(template)) for name, template in CALL_TEMPLATES.items()},
    **{name: (found, ALL[name].tokenizer) for name, found in FORMAT_OF_FAMILY.items()},
}
MARKS = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<function=add>", "</function>", "<parameter=text>"),
    *("<minimax:tool_call>", '<invoke name="add">', "</invoke>", '<parameter name="text">', "</minimax:tool_call>"),
    *("<|tool_call_begin|>", "functions.add:0", "<|tool_call_argument_begin|>", "{}", "<|tool_call_end|>"),
    *("<\uff5cDSML\uff5cfunction_calls>", '<\uff5cDSML\uff5cinvoke name="add">', "</\uff5cDSML\uff5cinvoke>"),
    *('<\uff5cDSML\uff5cparameter name="text" string="false">', "</\uff5cDSML\uff5cparameter>"),
    *("</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "look_up"),
    *("add(", "text=", "'", ",", ")"),
    *("<function_calls>", "</function_calls>", '{"name": "add", "arguments": {', "}", "[", "]", '"', ";", "```", "\n"),
    *("<|start|>", "<|channel|>", " to=functions.add", "<|message|>", "<|call|>", "<|end|>", "<|python_tag|>"),
    *(f"<\uff5ctool▁{name}\uff5c>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")),
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ['"', "\\", "null", "3", "a\nb", "  ", "é \U0001f600", "{}", "</p>", "[x]"]
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXT,
        "count": st.integers(-(10**20), 10**20),
        "share": st.floats(allow_nan=False, allow_infinity=False),
        "is_on": st.booleans(),
        "places": st.lists(st.integers(), max_size=3),
        "options": st.dictionaries(TEXT, st.integers() | TEXT | st.none(), max_size=2),
    },
)
CALLS = st.lists(st.builds(ToolCall, st.sampled_from(list(SCHEMAS)), ARGUMENTS), min_size=1, max_size=3)


def shown(tokenizer: PreTrainedTokenizerBase, calls: Sequence[ToolCall]) -> str:
    """Return what a chat template writes for a turn of calls, and the glue behind it."""
    render = text_renderer_for(tokenizer)
    made = [
        {
            "id": f"abcdefgh{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": dict(call.arguments)},
        }
        for index, call in enumerate(calls)
    ]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": "qx7"}  # type: ignore[index]
        for call in made
    ]
    question = {"role": "user", "content": "q"}
    inputs = TemplateInputs(tools=tuple(DEFINITIONS))
    before = render([question], inputs).rstrip().removesuffix("</think>").rstrip().removesuffix("<think>")
    whole = render([question, {"role": "assistant", "content": "", "tool_calls": made}, *results], inputs)
    assert whole.startswith(before)
    return whole[len(before) :].partition("qx7")[0]


def test_the_format_is_shown_as_a_line() -> None:
    for name, (found, tokenizer) in TOKENIZERS.items():
        shows_definitions = "DeepSeek-V3" not in name and "DeepSeek-R1" not in name
        assert calls_line(tokenizer) == (f"tool calls: {found} (env.driver.format)" if shows_definitions else None), (
            name
        )
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert calls_line(make_byte_tokenizer(plain)) is None
    assert calls_line(make_byte_tokenizer(None)) is None
    assert calls_line(make_byte_tokenizer("{{ raise_exception('no') }}")) is None
    unknown = (
        "{{ tools }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function }}{% endfor %}"
        "{% endfor %}"
    )
    assert calls_line(make_byte_tokenizer(unknown)) == (
        "tool calls: the chat template writes them in an unknown format; set env.driver.format"
    )


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_format_is_found_by_the_chat_template(name: str) -> None:
    expected, tokenizer = TOKENIZERS[name]
    assert format_of(tokenizer, None, NO_INPUTS) is TOOL_FORMATS[expected]


@pytest.mark.parametrize("name", some_of(TOKENIZERS, 6))
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(calls=CALLS)
def test_calls_that_a_chat_template_writes_are_read_in_their_order(name: str, calls: list[ToolCall]) -> None:
    expected, tokenizer = TOKENIZERS[name]
    try:
        text = shown(tokenizer, calls)
    except RenderError:  # one call a turn
        calls = calls[:1]
        text = shown(tokenizer, calls)
    if expected == "harmony":  # of several calls the family's template shows the first
        calls = calls[:1]
    assert TOOL_FORMATS[expected].calls(text, SCHEMAS) == calls


@pytest.mark.parametrize("name", TOOL_FORMATS)
@settings(max_examples=examples(150), deadline=None)
@given(text=st.lists(st.sampled_from(MARKS) | TEXT, max_size=12).map("".join), begins_in_thinking=st.booleans())
@example(text="[" * 100_000, begins_in_thinking=False)
@example(text="<function=add><parameter=text>" * 10_000, begins_in_thinking=False)
@example(text="<tool_call>add<arg_key>text</arg_key><arg_value>" * 5_000, begins_in_thinking=False)
@example(text='{"name": "add", ' * 15_000, begins_in_thinking=False)
@example(text="<tool_call>" + "[" * 100_000, begins_in_thinking=False)
@example(text="<function_calls>add(a=" + "[" * 100_000 + "]" * 100_000 + ")", begins_in_thinking=False)
@example(text="<function_calls>add(a=" + "-" * 100_000 + "1)", begins_in_thinking=False)
@example(text="<function_calls>add(a=1" + "+1" * 100_000 + ")", begins_in_thinking=False)
@example(text="<function_calls>add(a=" + '"\\' * 100_000 + ")", begins_in_thinking=False)
@example(text="<function_calls>" + "add(a=1)" * 20_000, begins_in_thinking=False)
@example(
    text='<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", begins_in_thinking=False
)
def test_no_text_is_an_error(name: str, text: str, begins_in_thinking: bool) -> None:
    for call in TOOL_FORMATS[name].calls(text, SCHEMAS, begins_in_thinking=begins_in_thinking):
        if isinstance(call, MalformedCall):
            assert call.problem
            assert len(call.problem) < 400
        else:
            json.dumps(call.arguments)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_the_example_that_malformed_calls_are_answered_with_is_well_formed(name: str) -> None:
    tool_format = TOOL_FORMATS[name]
    assert tool_format.calls(tool_format.example, {}) == [ToolCall("tool", {"argument": "value"})]


THOUGHT = "<think>\nI could write {0} here.\n</think>\n\n"


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if name != "harmony"])
def test_what_is_thought_is_no_call(name: str) -> None:
    tool_format = TOOL_FORMATS[name]
    call = tool_format.example
    thought = THOUGHT.replace("{0}", call)
    assert tool_format.calls(thought, {}) == []
    assert tool_format.calls(thought + "Done.", {}) == []
    assert len(tool_format.calls(thought + call, {})) == 1
    assert tool_format.calls(thought.partition("</think>")[0], {}) == []
    opened = thought.removeprefix("<think>\n")
    assert tool_format.calls(opened, {}, begins_in_thinking=True) == []
    assert len(tool_format.calls(opened + call, {}, begins_in_thinking=True)) == 1
    assert tool_format.calls(opened.partition("</think>")[0], {}, begins_in_thinking=True) == []


def test_harmony_reads_recipients_alone() -> None:
    analysis = '<|channel|>analysis<|message|>I call to=functions.add {"a": 1}<|end|><|start|>assistant'
    call = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"count": 1}'
    final = '<|channel|>final<|message|>{"name": "add", "arguments": {}}'
    harmony = TOOL_FORMATS["harmony"]
    assert harmony.calls(analysis + final, SCHEMAS) == []
    assert harmony.calls(analysis + call, SCHEMAS) == [ToolCall("add", {"count": 1})]
    (other,) = harmony.calls(call.replace("functions.add", "browser.search"), SCHEMAS)
    assert other == MalformedCall("there is no recipient 'browser.search', expected functions. and the name of a tool")


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', "invalid JSON: Expecting ',' delim"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'the call has no "name", the name of a tool'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "the arguments are no object"),
        ("hermes", '<tool_call>["add"]</tool_call>', "expected an object with name and arguments"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}} now', "expected </tool_call> before 'now'"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is no number of JSON"),
        ("hermes", "<tool_call>add(1)</tool_call>", "invalid JSON: Expecting value at 'add(1)"),
        (
            "hermes",
            '<tool_call>{"name": "add</tool_call>',
            "invalid JSON: Unterminated string starting at '\"add</tool",
        ),
        ("qwen3_coder", '<tool_call>{"name": "add"}</tool_call>', "expected <function= and the name of a tool"),
        ("qwen3_coder", "<function=add><parameter=text>1", "expected </parameter> before the end of the turn"),
        (
            "qwen3_coder",
            "<function=add><parameter=text></parameter> 1</function>",
            "expected <parameter= or </function>",
        ),
        (
            "glm45",
            "<tool_call>add<arg_key>a</arg_key><arg_value>1</tool_call>",
            "expected </arg_value> after the value",
        ),
        ("minimax_m2", "<minimax:tool_call>add</minimax:tool_call>", "expected <invoke name= and the name of a tool"),
        (
            "kimi_k2",
            "<|tool_call_begin|>add<|tool_call_argument_begin|>{}",
            "expected functions.NAME:NUMBER<|tool_call_a",
        ),
        ("glm45", "<tool_call><arg_key>a</arg_key></tool_call>", "expected the name of a tool after <tool_call>"),
        ("glm45", "<tool_call>add\n<arg_key>a</arg_key></tool_call>", "expected </tool_call> before '<arg_key>"),
        ("mistral", '[TOOL_CALLS] "add"', "expected a list of objects"),
        ("mistral_args", '[TOOL_CALLS] [{"name": "add"}]', "expected the name of a tool and [ARGS]"),
        ("llama3_json", '{"name": "add", "parameters": {"a" 1}}', "invalid JSON: Expecting ':' delimiter"),
        ("function_calls", "<function_calls>add(a=1)</function_calls>", "invalid JSON"),
        ("harmony", "<|channel|>commentary to=functions.add<|message|>a=1", "invalid JSON"),
        ("olmo3", "<function_calls></function_calls>", 'expected a call such as tool(argument="value") before'),
        ("olmo3", "<function_calls>add(1)</function_calls>", "expected argument=value or ) before '1)"),
        ("olmo3", "<function_calls>add(a=f(1))</function_calls>", "'f(1)' is no value of JSON"),
        ("olmo3", "<function_calls>add(a=)</function_calls>", "'' is no value of JSON"),
        ("olmo3", "<function_calls>add(a={1, 2})</function_calls>", "'{1, 2}' is no value of JSON"),
        ("olmo3", "<function_calls>add(a=[1)</function_calls>", "expected ) before the end of the turn"),
        ("olmo3", '<function_calls>add(a="1)</function_calls>', 'expected " before the end of the turn'),
        ("olmo3", "<function_calls>add(a=1)", "expected a call such as"),
    ],
)
def test_a_malformed_call_says_what_is_wrong(name: str, text: str, problem: str) -> None:
    (call,) = TOOL_FORMATS[name].calls(text, SCHEMAS)
    assert isinstance(call, MalformedCall)
    assert problem in call.problem


def test_expressions_have_values_of_json_or_of_python() -> None:
    text = """<function_calls>
    add(text='it"s', places=(1, 2), is_on=True, note=None)
    add(text="it's, (so)", options={"a": [null, true]}, note=null,), look_up()
    </function_calls> and <function_calls>look_up(text='\\d', share=-.5)</function_calls>"""
    assert TOOL_FORMATS["olmo3"].calls(text, SCHEMAS) == [
        ToolCall("add", {"text": 'it"s', "places": [1, 2], "is_on": True, "note": None}),
        ToolCall("add", {"text": "it's, (so)", "options": {"a": [None, True]}, "note": None}),
        ToolCall("look_up", {}),
        ToolCall("look_up", {"text": "\\d", "share": -0.5}),
    ]


def test_calls_around_a_malformed_one_are_read() -> None:
    good = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    kinds = [type(call) for call in TOOL_FORMATS["hermes"].calls(f"{good}<tool_call>x</tool_call>{good}", {})]
    assert kinds == [ToolCall, MalformedCall, ToolCall]
    kinds = [type(call) for call in TOOL_FORMATS["hermes"].calls(f"<tool_call>x{good}", {})]
    assert kinds == [MalformedCall, ToolCall]


def test_a_mark_within_an_argument_is_a_text() -> None:
    call = ToolCall("add", {"text": "</tool_call><tool_call><think>"})
    text = f"<tool_call>{json.dumps({'name': 'add', 'arguments': call.arguments})}</tool_call> done"
    assert TOOL_FORMATS["hermes"].calls(text, {}) == [call]


def test_two_calls_of_llama_one_a_line_are_two() -> None:
    call = '{"name": "add", "parameters": {"count": 3}}'
    expected = [ToolCall("add", {"count": 3})] * 2
    for text in (f"{call}\n{call}", f"{call}; {call}", f"I add twice: {call} and {call}."):
        assert TOOL_FORMATS["llama3_json"].calls(text, SCHEMAS) == expected


def test_a_call_of_tags_needs_no_mark_around() -> None:
    call = "I add.\n<function=add>\n<parameter=count>\n3\n</parameter>\n</function>"
    for text in (call, f"{call}\n</tool_call>"):
        assert TOOL_FORMATS["qwen3_coder"].calls(text, SCHEMAS) == [ToolCall("add", {"count": 3})]


def test_the_end_of_a_turn_closes_a_whole_call() -> None:
    for name in ("hermes", "qwen3_coder", "glm45", "minimax_m2", "kimi_k2", "deepseek_v32"):
        tool_format = TOOL_FORMATS[name]
        whole = tool_format.example
        for end in ("</tool_call>", "</minimax:tool_call>", "<|tool_calls_section_end|>", "<|tool_call_end|>"):
            whole = whole.removesuffix(end)
        whole = whole.removesuffix("</\uff5cDSML\uff5cfunction_calls>")
        assert whole != tool_format.example
        assert tool_format.calls(whole, {}) == [ToolCall("tool", {"argument": "value"})]


def test_two_functions_in_one_mark_are_two_calls() -> None:
    text = "<tool_call>\n<function=add>\n</function>\n<function=look_up>\n</function>\n</tool_call>"
    assert TOOL_FORMATS["qwen3_coder"].calls(text, SCHEMAS) == [ToolCall("add", {}), ToolCall("look_up", {})]


_BAR = "\uff5c"
OPEN_TAGS = {
    "qwen3_coder": ("<tool_call><function=add>", "<parameter={}>\n{}\n", "</parameter>", "</function></tool_call>"),
    "minimax_m2": (
        '<minimax:tool_call><invoke name="add">',
        '<parameter name="{}">{}',
        "</parameter>",
        "</invoke></minimax:tool_call>",
    ),
    "deepseek_v32": tuple(
        part.replace("|", f"{_BAR}DSML{_BAR}")
        for part in (
            '<|function_calls><|invoke name="add">',
            '<|parameter name="{}" string="true">{}',
            "</|parameter>",
            "</|invoke></|function_calls>",
        )
    ),
}


@pytest.mark.parametrize("name", OPEN_TAGS)
def test_a_parameter_whose_end_is_missing_does_not_swallow_the_next(name: str) -> None:
    begin, parameter, closed, end = OPEN_TAGS[name]
    read = TOOL_FORMATS[name].calls
    text, count = parameter.format("text", "a b"), parameter.format("count", "3")
    assert read(begin + text + count + closed + end, SCHEMAS) == [ToolCall("add", {"text": "a b", "count": 3})]
    last = begin + text + end
    assert read(last, SCHEMAS) == [ToolCall("add", {"text": "a b"})]
    assert read(last + begin + count + closed + end, SCHEMAS) == [
        ToolCall("add", {"text": "a b"}),
        ToolCall("add", {"count": 3}),
    ]
    (cut,) = read(begin + text, SCHEMAS)
    assert cut == MalformedCall(f"expected {closed} before the end of the turn")


def test_a_value_whose_end_is_missing_is_no_call_of_glm() -> None:
    text = (
        "<tool_call>add<arg_key>text</arg_key><arg_value>a<arg_key>count</arg_key><arg_value>3</arg_value></tool_call>"
    )
    (call,) = TOOL_FORMATS["glm45"].calls(text, SCHEMAS)
    assert call == MalformedCall("expected </arg_value> after the value of text")


def test_an_answer_in_json_is_no_call() -> None:
    assert TOOL_FORMATS["llama3_json"].calls('{"answer": 3}', {}) == []
    assert TOOL_FORMATS["llama3_json"].calls('{"name": "Bob", "age": 3}', {}) == []
    assert TOOL_FORMATS["llama3_json"].calls("{x", {}) == []


OWN = ToolFormat(lambda text, schemas: [], "CALL")
NO_FORMAT = 3


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("hermess", "env.driver.format: got 'hermess', expected one of hermes, qwen3_coder"),
        (f"{__name__}:NO_FORMAT", "is 3 (int), expected a ToolFormat"),
        (f"{__name__}:NONE", "has no NONE"),
    ],
)
def test_a_format_that_is_none_is_refused(named: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        format_of(ALL["OLMoE"].tokenizer, named, NO_INPUTS)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_parser_of_vllm_needs_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_parsers, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError) as caught:
        format_of(ALL["OLMoE"].tokenizer, "vllm:kimi_k2", NO_INPUTS)
    assert str(caught.value).startswith(
        "env.driver.format: vllm:kimi_k2 needs vLLM, which is not installed; install it with"
    )


def test_a_format_can_be_named() -> None:
    assert format_of(ALL["THINKING"].tokenizer, "hermes", NO_INPUTS) is TOOL_FORMATS["hermes"]
    assert format_of(ALL["THINKING"].tokenizer, f"{__name__}:OWN", NO_INPUTS) is OWN


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("THINKING", "env.driver.format: null, and the chat template writes calls in no known format: '<call>{"),
        ("NEWLINE_BETWEEN_TURNS", "env.driver: the chat template cannot render a tool call and its result"),
        ("tiny_qwen3_moe", "env.driver: the chat template cannot render a tool call and its result"),
    ],
)
def test_a_chat_template_without_a_known_format_is_refused(family: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        format_of(ALL[family].tokenizer, None, NO_INPUTS)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tools_need_a_chat_template() -> None:
    tokenizer: Any = make_byte_tokenizer("")
    tokenizer.chat_template = None
    with pytest.raises(ConfigurationError, match="the tokenizer has no chat template that could show tools"):
        format_of(tokenizer, "hermes", NO_INPUTS)


HERMES_CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def test_a_turn_of_malformed_calls_is_not_read_to_its_end() -> None:
    """Each of them costs a search up to the end of the text: 4,000 of OLMo-3's took five seconds."""
    bad, good = '<function_calls>f(a="', "<function_calls>f(a=1)</function_calls>"
    found = TOOL_FORMATS["olmo3"].calls(bad * (MOST_MALFORMED + 5) + good, {})
    assert len(found) == MOST_MALFORMED
    assert all(isinstance(call, MalformedCall) for call in found)
    found = TOOL_FORMATS["hermes"].calls("<tool_call>x</tool_call>" * (MOST_MALFORMED - 1) + HERMES_CALL, {})
    assert isinstance(found[-1], ToolCall)
