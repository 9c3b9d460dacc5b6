# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""vLLM's own parsers of calls as formats: `env.driver.format: vllm:NAME`."""

import pytest

from nemo_rl_moe.data.template_inputs import NO_INPUTS
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.tools.detection import format_of
from nemo_rl_moe.tools.formats.interface import MalformedCall, ToolCall
from nemo_rl_moe.tools.formats.registry import TOOL_FORMATS
from tests.support.chat_templates import make_byte_tokenizer
from tests.support.conversations import ALL
from tests.support.published_templates import CALL_TEMPLATES

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm.tool_parsers", reason="make vllm installs it")

SCHEMAS = {"tool": {"argument": {"type": "string"}, "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}}
CALL = ToolCall("tool", {"argument": "value"})
TEMPLATES = ("qwen3_coder", "glm45", "deepseek_v32", "kimi_k2", "minimax_m2")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_parser_of_vllm_reads_the_example_of_the_format_of_its_name(name: str) -> None:
    tokenizer = make_byte_tokenizer(CALL_TEMPLATES[name])
    tool_format = format_of(tokenizer, f"vllm:{name}", NO_INPUTS)
    assert tool_format.example == TOOL_FORMATS[name].example
    call = tool_format.example
    assert tool_format.calls(f"I call.\n{call}", SCHEMAS) == [CALL]
    assert tool_format.calls("Done.", SCHEMAS) == []
    assert tool_format.calls(f"<think>{call}</think>Done.", SCHEMAS) == []
    assert tool_format.calls(f"Hm. {call}</think>{call}", SCHEMAS, begins_in_thinking=True) == [CALL]


def test_a_parser_that_has_no_format_here_has_the_example_of_the_chat_template() -> None:
    template = CALL_TEMPLATES["qwen3_coder"].replace("tool_call>", "seed:tool_call>")
    tool_format = format_of(make_byte_tokenizer(template), "vllm:seed_oss", NO_INPUTS)
    assert tool_format.example.startswith("<seed:tool_call>\n<function=tool>")
    assert tool_format.example.endswith("</seed:tool_call>")
    (call,) = tool_format.calls(tool_format.example, SCHEMAS)
    assert isinstance(call, ToolCall)
    assert call.name == "tool"


def test_types_are_those_of_the_schema() -> None:
    tool_format = format_of(make_byte_tokenizer(CALL_TEMPLATES["qwen3_coder"]), "vllm:qwen3_coder", NO_INPUTS)
    text = tool_format.example.replace("argument", "count").replace("value", "5")
    assert tool_format.calls(text, SCHEMAS) == [ToolCall("tool", {"count": 5})]


def test_whatever_the_parser_does_is_no_error_of_the_run() -> None:
    kimi = format_of(make_byte_tokenizer(CALL_TEMPLATES["kimi_k2"]), "vllm:kimi_k2", NO_INPUTS)
    for arguments in ("{a", "[1]", "null", '{"a": NaN}'):
        (call,) = kimi.calls(kimi.example.replace('{"argument": "value"}', arguments), {})
        assert isinstance(call, MalformedCall)
    hermes = format_of(ALL["Qwen3, Qwen3-MoE"].tokenizer, "vllm:hermes", NO_INPUTS)
    (call,) = hermes.calls(hermes.example, {"tool": {"a": {1, 2}}, 3: {}})  # type: ignore[dict-item]
    assert isinstance(call, MalformedCall)
    assert "the parser cannot read it" in call.problem


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vllm:hermess", "env.driver.format: got 'vllm:hermess', expected vllm: and one of apertus, "),
        ("vllm:hermess", "; did you mean hermes?"),
        (
            "vllm:llama3_json",
            "env.driver.format: vllm:llama3_json: the parser does not take the run's tokenizer: Runtime",
        ),
    ],
)
def test_a_parser_that_cannot_be_used_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        format_of(ALL["Qwen3, Qwen3-MoE"].tokenizer, name, NO_INPUTS)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
