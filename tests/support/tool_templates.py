# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Compact chat templates in the families' published token formats for tools."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolFormat:
    """Format of one family.

    Attributes:
        template: Renders definitions, calls and results of tools.
        special_tokens: Texts that are one token.
        end_token: The tokenizer's end token.
        trained: Of the tests' conversation, each piece that the assistant wrote, with its end token.
        arguments_as_text: The template takes the arguments of a call as a text.
        null_content: A turn that only calls has null for its content.
    """

    template: str
    special_tokens: tuple[str, ...]
    end_token: str
    trained: tuple[str, ...]
    arguments_as_text: bool = False
    null_content: bool = False

    def as_template_wants(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [self._turn(message) for message in messages]

    def _turn(self, message: dict[str, Any]) -> dict[str, Any]:
        if "tool_calls" not in message:
            return message
        calls = [
            {**call, "function": {**call["function"], "arguments": self._arguments(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
        return {**message, "content": None if self.null_content else "", "tool_calls": calls}

    def _arguments(self, arguments: Any) -> Any:
        return json.dumps(arguments) if self.arguments_as_text else arguments


_ARGUMENTS = '{"a": 1, "b": 2}'

# Qwen2, Qwen2.5, Qwen3 and their MoE models: ChatML; definitions in the system turn, calls in <tool_call>, results in a
# user turn.
_HERMES_IN_CHATML = """\
{{- '<|im_start|>system\\n' }}
{%- if tools %}
    {{- '<tools>\\n' }}{% for tool in tools %}{{- tool | tojson + '\\n' }}{% endfor %}{{- '</tools>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '<tool_call>\\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
_HERMES_CALL = f'<tool_call>\n{{"name": "add", "arguments": {_ARGUMENTS}}}\n</tool_call><|im_end|>'
# Llama 3.1: headers, definitions in the first turn of the user, one call as an object of JSON, results from `ipython`.
_LLAMA = """\
{{- '<|begin_of_text|>' }}
{%- for m in messages %}
    {%- set role = 'ipython' if m.role == 'tool' else m.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
    {%- if loop.first and tools %}{% for tool in tools %}{{- tool | tojson + '\\n' }}{% endfor %}{% endif %}
    {%- if m.tool_calls %}
        {%- if m.tool_calls | length > 1 %}{{- raise_exception('one call a turn') }}{% endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
    {%- else %}
        {{- m.content }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
# Mistral and Mixtral of the third tokenizer: definitions before the last turn of the user, calls as a list of JSON with
# ids of nine characters.
_MISTRAL = """\
{{- '<s>' }}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.index0 == ns.last %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + m.content + '[/INST]' }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + m.content | tojson + ', "call_id": "' + m.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- elif m.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('ids have nine characters') }}{% endif %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
            {{- ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
        {%- endfor %}
        {{- ']</s>' }}
    {%- else %}
        {{- ' ' + m.content + '</s>' }}
    {%- endif %}
{%- endfor %}
"""
# DeepSeek-V3: arguments as a text in a block of code, null content where a turn only calls, no header after results.
_DEEPSEEK = """\
{{- '<|begin_of_sentence|>' }}
{%- if tools %}{% for tool in tools %}{{- tool | tojson + '\\n' }}{% endfor %}{% endif %}
{%- set ns = namespace(after_result=false) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<|User|>' + m.content }}{% set ns.after_result = false %}{% endif %}
    {%- if m.role == 'assistant' and m.content is none %}
        {{- '<|Assistant|><|tool_calls_begin|>' }}
        {%- for call in m.tool_calls %}
            {{- '<|tool_call_begin|>function<|tool_sep|>' + call.function.name + '\\n```json\\n' }}
            {{- call.function.arguments + '\\n```<|tool_call_end|>' }}
        {%- endfor %}
        {{- '<|tool_calls_end|><|end_of_sentence|>' }}
    {%- elif m.role == 'assistant' %}
        {{- ('' if ns.after_result else '<|Assistant|>') + m.content + '<|end_of_sentence|>' }}
        {%- set ns.after_result = false %}
    {%- elif m.role == 'tool' %}
        {{- '<|tool_outputs_begin|><|tool_output_begin|>' + m.content + '<|tool_output_end|><|tool_outputs_end|>' }}
        {%- set ns.after_result = true %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.after_result %}{{- '<|Assistant|>' }}{% endif %}
"""
# gpt-oss: harmony's channels; a call names its recipient in the header, the last answer ends with <|return|>.
_HARMONY = """\
{%- if tools %}
    {{- '<|start|>developer<|message|>' }}
    {%- for tool in tools %}{{- tool.function | tojson }}{% endfor %}{{- '<|end|>' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|start|>functions.' + m.name + ' to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
    {%- elif m.role == 'assistant' and m.tool_calls %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson + '<|call|>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}
"""
# OLMoE's chat format has roles as marks and no tools of its own; definitions and calls as Tulu's data writes them.
_TULU = """\
{{- '<|endoftext|>' }}
{%- if tools %}{{- '<|system|>\\n<functions>' + tools | tojson + '</functions>\\n' }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|assistant|>\\n' + m.content }}
        {%- if m.tool_calls %}
            {{- '<function_calls>' + m.tool_calls | map(attribute='function') | list | tojson }}
            {{- '</function_calls>' }}
        {%- endif %}
        {{- '<|endoftext|>' + ('' if loop.last else '\\n') }}
    {%- else %}
        {{- '<|' + ('environment' if m.role == 'tool' else m.role) + '|>\\n' + m.content + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{% endif %}
"""
# OLMo-3: ChatML; definitions in the system turn, calls as expressions with JSON for values, one a line, results from
# `environment`. The last turn ends with the tokenizer's end token and no line break.
_OLMO3 = """\
{{- '<|im_start|>system\\n' }}
{%- if tools %}{{- '<functions>' + tools | tojson + '</functions>' }}{% endif %}{{- '<|im_end|>\\n' }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + (m.content or '') }}
        {%- if m.tool_calls %}
            {{- '<function_calls>' }}
            {%- for call in m.tool_calls %}
                {%- set ns = namespace(arguments=[]) %}
                {%- for key, value in call.function.arguments.items() %}
                    {%- set ns.arguments = ns.arguments + [key ~ '=' ~ (value | tojson)] %}
                {%- endfor %}
                {{- call.function.name + '(' + ns.arguments | join(', ') + ')' + ('' if loop.last else '\\n') }}
            {%- endfor %}
            {{- '</function_calls>' }}
        {%- endif %}
        {{- eos_token if loop.last else '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + ('environment' if m.role == 'tool' else m.role) + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
    {%- if loop.last and add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
{%- endfor %}
"""

_CHATML = ToolFormat(
    _HERMES_IN_CHATML,
    ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"),
    "<|im_end|>",
    (_HERMES_CALL, "It is 3.<|im_end|>", "Welcome.<|im_end|>"),
)
FAMILIES = {
    "Qwen2.5, Qwen2-MoE": _CHATML,
    # Answers behind the last question open with a think block, calls among them where that question is the last.
    "Qwen3, Qwen3-MoE": ToolFormat(
        _HERMES_IN_CHATML.replace(
            "{{- '<|im_start|>' + m.role + '\\n' + m.content }}",
            "{{- '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' and loop.last %}"
            "{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}{{- m.content }}",
        ),
        (*_CHATML.special_tokens, "<think>", "</think>"),
        "<|im_end|>",
        (_HERMES_CALL, "It is 3.<|im_end|>", "<think>\n\n</think>\n\nWelcome.<|im_end|>"),
    ),
    "Llama 3.1": ToolFormat(
        _LLAMA,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        (f'{{"name": "add", "parameters": {_ARGUMENTS}}}<|eot_id|>', "It is 3.<|eot_id|>", "Welcome.<|eot_id|>"),
    ),
    "Mistral, Mixtral": ToolFormat(
        _MISTRAL,
        ("</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]"),
        "</s>",
        (
            f'[TOOL_CALLS] [{{"name": "add", "arguments": {_ARGUMENTS}, "id": "abcdefghi"}}]</s>',
            " It is 3.</s>",
            " Welcome.</s>",
        ),
    ),
    "DeepSeek-V3": ToolFormat(
        _DEEPSEEK,
        ("<|begin_of_sentence|>", "<|end_of_sentence|>", "<|User|>", "<|Assistant|>", "<|tool_calls_begin|>"),
        "<|end_of_sentence|>",
        (
            "<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>add\n```json\n"
            f"{_ARGUMENTS}\n```<|tool_call_end|><|tool_calls_end|><|end_of_sentence|>",
            "It is 3.<|end_of_sentence|>",
            "Welcome.<|end_of_sentence|>",
        ),
        arguments_as_text=True,
        null_content=True,
    ),
    # Of earlier answers all but the end token, which is not the one that the model is to write.
    "gpt-oss": ToolFormat(
        _HARMONY,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"),
        "<|return|>",
        (
            f" to=functions.add<|channel|>commentary json<|message|>{_ARGUMENTS}<|call|>",
            "<|channel|>final<|message|>It is 3.",
            "<|channel|>final<|message|>Welcome.<|return|>",
        ),
    ),
    "OLMoE": ToolFormat(
        _TULU,
        ("<|endoftext|>",),
        "<|endoftext|>",
        (
            f'<function_calls>[{{"name": "add", "arguments": {_ARGUMENTS}}}]</function_calls><|endoftext|>',
            "It is 3.<|endoftext|>",
            "Welcome.<|endoftext|>",
        ),
    ),
    "OLMo-3": ToolFormat(
        _OLMO3,
        ("<|im_start|>", "<|im_end|>", "<functions>", "</functions>", "<function_calls>", "</function_calls>"),
        "<|im_end|>",
        ("<function_calls>add(a=1, b=2)</function_calls><|im_end|>", "It is 3.<|im_end|>", "Welcome.<|im_end|>"),
    ),
}
