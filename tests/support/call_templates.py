# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Compact chat templates that write calls in the published formats which no other template of the tests has."""

_BAR = "\uff5c"

_FRAME = """\
{%- if tools %}
    {{- '<|start|>system\\n' }}{% for tool in tools %}{{- tool | tojson }}{% endfor %}{{- '<|end|>' }}
{%- endif %}
{%- for m in messages %}
    {{- '<|start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}
        {{- m.content or '' }}
        {%- for call in m.tool_calls or [] %}
CALL
        {%- endfor %}
    {%- else %}
        {{- m.content }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\nPROMPTED' }}{% endif %}
"""

_QWEN3_CODER = """\
            {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
"""
_GLM45 = """\
            {{- '\\n<tool_call>' + call.function.name + '\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
                {{- (value if value is string else value | tojson) + '</arg_value>\\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
"""
_DEEPSEEK_V31 = """\
            {{- '<|tool▁calls▁begin|>' if loop.first else '' }}
            {{- '<|tool▁call▁begin|>' + call.function.name + '<|tool▁sep|>' + call.function.arguments }}
            {{- '<|tool▁call▁end|>' + ('<|tool▁calls▁end|>' if loop.last else '') }}
"""
_DEEPSEEK_V32 = """\
            {{- '\\n\\n<|DSML|function_calls>\\n' if loop.first else '' }}
            {{- '<|DSML|invoke name="' + call.function.name + '">\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<|DSML|parameter name="' + key + '" string="' + ('true' if value is string else 'false') + '">' }}
                {{- (value if value is string else value | tojson) + '</|DSML|parameter>\\n' }}
            {%- endfor %}
            {{- '</|DSML|invoke>\\n' + ('</|DSML|function_calls>' if loop.last else '') }}
"""
_MINIMAX_M2 = """\
            {{- '\\n<minimax:tool_call>\\n' if loop.first else '' }}
            {{- '<invoke name="' + call.function.name + '">\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<parameter name="' + key + '">' }}
                {{- (value if value is string else value | tojson) + '</parameter>\\n' }}
            {%- endfor %}
            {{- '</invoke>\\n' + ('</minimax:tool_call>' if loop.last else '') }}
"""
_KIMI_K2 = """\
            {{- '<|tool_calls_section_begin|>' if loop.first else '' }}
            {{- '<|tool_call_begin|>functions.' + call.function.name + ':' + loop.index0 | string }}
            {{- '<|tool_call_argument_begin|>' + call.function.arguments | tojson + '<|tool_call_end|>' }}
            {{- '<|tool_calls_section_end|>' if loop.last else '' }}
"""
_MISTRAL_ARGS = """\
            {{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' }}
            {{- call.function.arguments | tojson }}
"""
_HARMONY = """\
{%- if tools %}{% for tool in tools %}{{- tool | tojson }}{% endfor %}{{- '<|end|>' }}{% endif %}
{%- for m in messages %}
    {%- if m.tool_calls %}
        {%- if m.tool_calls | length > 1 %}{{- raise_exception('one call a turn') }}{% endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start|>assistant<|channel|>commentary to=functions.' + call.name + ' <|constrain|>json<|message|>' }}
        {{- call.arguments | tojson + '<|call|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>functions.' + m.name + ' to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}
"""


def _framed(call: str, prompted: str = "") -> str:
    return _FRAME.replace("CALL\n", call).replace("PROMPTED", prompted)


CALL_TEMPLATES = {
    "qwen3_coder": _framed(_QWEN3_CODER),
    "qwen3_coder, the prompt opens thinking": _framed(_QWEN3_CODER, "<think>\\n"),
    "glm45": _framed(_GLM45),
    "glm45, the prompt opens thinking": _framed(_GLM45, "<think>"),
    "deepseek_v31": _framed(_DEEPSEEK_V31.replace("|>", f"{_BAR}>").replace("<|", f"<{_BAR}")),
    "deepseek_v32": _framed(_DEEPSEEK_V32.replace("|DSML|", f"{_BAR}DSML{_BAR}")),
    "deepseek_v32, the prompt opens and closes thinking": _framed(
        _DEEPSEEK_V32.replace("|DSML|", f"{_BAR}DSML{_BAR}"), "<think></think>"
    ),
    "minimax_m2": _framed(_MINIMAX_M2, "<think>\\n"),
    "kimi_k2": _framed(_KIMI_K2),
    "mistral_args": _framed(_MISTRAL_ARGS),
    "harmony": _HARMONY,
}
"""By the format's name, and what else the template does."""
