# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Formats of calls that the published chat templates of the supported families write."""

import pytest

from nemo_rl_moe.data.template_inputs import NO_INPUTS, TemplateInputs
from nemo_rl_moe.data.turn_spans import RenderError
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.tools.detection import format_of
from nemo_rl_moe.tools.formats.interface import ToolCall
from nemo_rl_moe.tools.formats.registry import TOOL_FORMATS
from tests.support.chat_templates import make_byte_tokenizer
from tests.unit.tools.test_tool_formats import SCHEMAS, shown
from tests.world.conftest import Published

FORMATS: dict[tuple[str, str], str] = {
    ("llama-cpp-python", "Qwen-Qwen2.5-7B-Instruct.jinja"): "hermes",
    ("llama-cpp-python", "Qwen-Qwen3-0.6B.jinja"): "hermes",
    ("llama-cpp-python", "Qwen-QwQ-32B.jinja"): "hermes",
    ("llama-cpp-python", "Qwen3-Coder.jinja"): "qwen3_coder",
    ("llama-cpp-python", "Qwen3.5-4B.jinja"): "qwen3_coder",
    ("llama-cpp-python", "GLM-4.6.jinja"): "glm45",
    ("llama-cpp-python", "GLM-4.7-Flash.jinja"): "glm45",
    ("llama-cpp-python", "MiniMax-M2.jinja"): "minimax_m2",
    ("llama-cpp-python", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja"): "deepseek_v3",
    ("llama-cpp-python", "deepseek-ai-DeepSeek-V3.1.jinja"): "deepseek_v31",
    ("llama-cpp-python", "deepseek-ai-DeepSeek-V3.2.jinja"): "deepseek_v32",
    ("llama-cpp-python", "moonshotai-Kimi-K2.jinja"): "kimi_k2",
    ("llama-cpp-python", "meta-llama-Llama-3.1-8B-Instruct.jinja"): "llama3_json",
    ("llama-cpp-python", "meta-llama-Llama-3.2-3B-Instruct.jinja"): "llama3_json",
    ("llama-cpp-python", "meta-llama-Llama-3.3-70B-Instruct.jinja"): "llama3_json",
    ("llama-cpp-python", "mistralai-Mistral-Nemo-Instruct-2407.jinja"): "mistral",
    ("llama-cpp-python", "mistralai-Ministral-3-14B-Reasoning-2512.jinja"): "mistral_args",
    ("llama-cpp-python", "openai-gpt-oss-120b.jinja"): "harmony",
    ("trl", "deepseekv3.jinja"): "deepseek_v3",
    ("trl", "glm4moe.jinja"): "glm45",
    ("trl", "gptoss.jinja"): "harmony",
    ("trl", "llama3_1.jinja"): "llama3_json",
    ("trl", "llama3_2.jinja"): "llama3_json",
    ("trl", "qwen2_5.jinja"): "hermes",
    ("trl", "qwen3.jinja"): "hermes",
    ("trl", "qwen3_instruct_2507.jinja"): "hermes",
    ("trl", "qwen3_vl.jinja"): "hermes",
    ("trl", "qwen3_5_think.jinja"): "qwen3_coder",
    ("trl", "qwen3_5_nothink.jinja"): "qwen3_coder",
    ("trl", "qwen3_6.jinja"): "qwen3_coder",
}
"""By package and file of the template."""
OF_OTHER_FORMATS = (
    "ByteDance-Seed-OSS.jinja",
    "deepseek-ai-DeepSeek-V4.jinja",
    "GigaChat3.1-10B-A1.8B.jinja",
    "NVIDIA-Nemotron-Nano-v2.jinja",
    "unsloth-Apriel-1.5.jinja",
    "LFM2.5-8B-A1B.jinja",
)
"""Templates whose marks are others, though a format would read the calls between them."""
CALLS = [
    ToolCall("add", {"text": "two words", "count": 3, "is_on": True, "share": 0.5}),
    ToolCall("look_up", {"places": [1, 2], "options": {"a": None}, "text": "line\nline <b>"}),
]


@pytest.mark.parametrize(("package", "file"), FORMATS)
def test_the_format_of_a_published_template_is_found(package: str, file: str, published: Published) -> None:
    tokenizer = make_byte_tokenizer((published(package) / file).read_text("utf-8"))
    assert format_of(tokenizer, None, NO_INPUTS) is TOOL_FORMATS[FORMATS[package, file]]


@pytest.mark.parametrize(("package", "file"), FORMATS)
def test_calls_that_a_published_template_writes_are_read(package: str, file: str, published: Published) -> None:
    tokenizer = make_byte_tokenizer((published(package) / file).read_text("utf-8"))
    calls = CALLS
    try:
        text = shown(tokenizer, calls)
    except RenderError:  # one call a turn
        calls = CALLS[:1]
        text = shown(tokenizer, calls)
    if FORMATS[package, file] == "harmony":  # of several calls the template shows the first
        calls = calls[:1]
    assert TOOL_FORMATS[FORMATS[package, file]].calls(text, SCHEMAS) == calls


@pytest.mark.parametrize("file", OF_OTHER_FORMATS)
def test_a_template_with_other_marks_has_no_format_here(file: str, published: Published) -> None:
    tokenizer = make_byte_tokenizer((published("llama-cpp-python") / file).read_text("utf-8"))
    with pytest.raises(ConfigurationError, match="writes calls in no known format"):
        format_of(tokenizer, None, TemplateInputs())
