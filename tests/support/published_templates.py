# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Chat templates that behave as published ones do, what those lose included, and compact ones for formats of calls."""

# Calls are opened and closed once in a conversation, results too, and thinking is left out of every turn.
_DEEPSEEK = """\
{%- set ns = namespace(called=false, is_tool=false, has_result=false, system='', is_next=false) %}
{%- for m in messages if m.role == 'system' %}
    {%- set ns.system = ns.system + ('\\n\\n' if ns.is_next else '') + m.content %}{%- set ns.is_next = true %}
{%- endfor %}
{{- bos_token + ns.system }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- set ns.is_tool = false %}{{- '<|User|>' + m.content }}
    {%- elif m.role == 'tool' %}
        {{- ('' if ns.has_result else '<|tool▁outputs▁begin|>') + '<|tool▁output▁begin|>' }}
        {{- m.content + '<|tool▁output▁end|>' }}
        {%- set ns.is_tool = true %}{%- set ns.has_result = true %}
    {%- elif m.role == 'assistant' and 'tool_calls' in m %}
        {%- set ns.is_tool = false %}
        {%- for call in m.tool_calls %}
            {{- '\\n' if ns.called else '<|Assistant|>' + (m.content or '') + '<|tool▁calls▁begin|>' }}
            {{- '<|tool▁call▁begin|>' + call.type + '<|tool▁sep|>' + call.function.name + '\\n```json\\n' }}
            {{- call.function.arguments + '\\n```<|tool▁call▁end|>' }}
            {%- set ns.called = true %}
        {%- endfor %}
        {{- '<|tool▁calls▁end|><|end▁of▁sentence|>' }}
    {%- elif m.role == 'assistant' and ns.is_tool %}
        {{- '<|tool▁outputs▁end|>' + m.content + '<|end▁of▁sentence|>' }}{%- set ns.is_tool = false %}
    {%- elif m.role == 'assistant' %}
        {{- '<|Assistant|>' + m.content.split('</think>')[-1] + '<|end▁of▁sentence|>' }}
    {%- endif %}
{%- endfor %}
{%- if ns.is_tool %}{{- '<|tool▁outputs▁end|>' }}{%- endif %}
{%- if add_generation_prompt and not ns.is_tool %}{{- '<|Assistant|>PROMPTED' }}{%- endif %}
"""
# The system turn stands in a question only where that is the last turn.
_MISTRAL = """\
{%- set system, turns = none, messages %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{%- set turns = messages[1:] %}
{%- endif %}
{%- set questions = turns | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(place=0) %}
{%- for m in turns if m.role != 'tool' and m.tool_calls is not defined %}
    {%- if (m.role == 'user') != (ns.place % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
    {%- set ns.place = ns.place + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for m in turns %}
    {%- if m.role == 'user' %}
        {%- if tools and m == questions[-1] %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.function.items() %}
                    {{- '"' + key + '": ' + ('"' + value + '"' if value is string else value | tojson) }}
                    {{- ', ' if not loop.last else '' }}
                {%- endfor %}
                {{- '}}' + (', ' if not loop.last else ']') }}
            {%- endfor %}
            {{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (system + '\\n\\n' if loop.last and system is not none else '') + m.content + '[/INST]' }}
    {%- elif m.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('nine characters') }}{%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (', ' if not loop.last else ']') }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif m.role == 'assistant' %}
        {{- ' ' + m.content | trim + eos_token }}
    {%- else %}
        {{- '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
_WITHOUT_BLANKS = {"] [": "][", "[INST] ": "[INST]", "] {": "]{", "' ' + m.content | trim": "m.content"}


# Thinking is left out of every turn, also with thinking on.
_DEEPSEEK_V31 = """\
{%- set ns = namespace(is_question=false, is_tool=false, system='', is_next=false) %}
{%- set thinks = thinking if thinking is defined else enable_thinking if enable_thinking is defined else false %}
{%- for m in messages if m.role == 'system' %}
    {%- set ns.system = ns.system + ('\\n\\n' if ns.is_next else '') + m.content %}{%- set ns.is_next = true %}
{%- endfor %}
{{- bos_token + ns.system }}
{%- for m in messages if m.role != 'system' %}
    {%- if m.role == 'user' %}{{- '<|User|>' + m.content }}
    {%- elif m.role == 'tool' %}{{- '<|tool▁output▁begin|>' + m.content + '<|tool▁output▁end|>' }}
    {%- else %}
        {{- '<|Assistant|><think></think>' if ns.is_question else '' }}
        {%- if m.tool_calls %}
            {{- (m.content or '') + '<|tool▁calls▁begin|>' }}
            {%- for call in m.tool_calls %}
                {{- '<|tool▁call▁begin|>' + call.function.name + '<|tool▁sep|>' + call.function.arguments | tojson }}
                {{- '<|tool▁call▁end|>' }}
            {%- endfor %}
            {{- '<|tool▁calls▁end|>' }}
        {%- else %}
            {{- m.content if ns.is_tool else m.content.split('</think>', 1)[-1] }}
        {%- endif %}
        {{- '<|end▁of▁sentence|>' }}
    {%- endif %}
    {%- set ns.is_question = m.role == 'user' %}{%- set ns.is_tool = m.role == 'tool' %}
{%- endfor %}
{{- '<|Assistant|><think>' + ('' if thinks else '</think>') if add_generation_prompt and ns.is_question }}
"""
# The ids of calls are put in a list, which the sandbox refuses.
_KIMI = """\
{%- set queue = namespace(ids=[], called=0, first=messages | length) %}
{%- for m in messages | reverse if m.role == 'assistant' and not m.get('tool_calls') %}
    {%- set queue.first = messages.index(m) %}
{%- endfor %}
{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{%- endif %}
{%- for m in messages %}
    {%- if loop.first and m.role != 'system' %}
        {{- '<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>NEWLINE' }}
    {%- endif %}
    {{- '<|im_' + (m.role if m.role in ('user', 'assistant') else 'system') + '|>' + (m.get('name') or m.role) }}
    {{- '<|im_middle|>' }}
    {%- if m.role == 'assistant' %}
        {{- THINKING + (m.content or '') }}
        {%- for call in m.get('tool_calls') or [] %}
            {%- set id = 'functions.' + call.function.name + ':' + queue.called | string %}
            {%- set _ = queue.ids.append(id) %}
            {%- set queue.called = queue.called + 1 %}
            {{- '<|tool_calls_section_begin|>' if loop.first else '' }}
            {{- '<|tool_call_begin|>' + id + '<|tool_call_argument_begin|>' + call.function.arguments | tojson }}
            {{- '<|tool_call_end|>' + ('<|tool_calls_section_end|>' if loop.last else '') }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {{- '## Return of ' + (queue.ids.pop(0) if queue.ids else 'functions.' + (m.get('name') or 'unknown') + ':0') }}
        {{- '\\n' + m.content }}
    {%- else %}
        {{- m.content }}
    {%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}
"""
_KEPT = "'<think>' + (m.get('reasoning_content') or '' if loop.index0 > queue.first else '') + '</think>'"


WIDE_BAR = "\uff5c"
"""Stands in DeepSeek's special tokens, where sources here have a plain one."""


def _without_blanks(template: str) -> str:
    for there, instead in _WITHOUT_BLANKS.items():
        template = template.replace(there, instead)
    return template


PUBLISHED = {
    "DeepSeek-R1": _DEEPSEEK.replace("|", WIDE_BAR).replace("PROMPTED", "<think>\\n"),
    "DeepSeek-V3": _DEEPSEEK.replace("|", WIDE_BAR).replace("PROMPTED", ""),
    "Mistral": _MISTRAL,
    "Mistral without blanks": _without_blanks(_MISTRAL),
    "Kimi-K2": _KIMI.replace("NEWLINE", "\\n").replace("THINKING", "''"),
    "Kimi-K2-Thinking": _KIMI.replace("NEWLINE", "").replace("THINKING", _KEPT),
    "DeepSeek-V3.1": _DEEPSEEK_V31.replace("|>", f"{WIDE_BAR}>").replace("<|", f"<{WIDE_BAR}"),
}
SPECIAL_TOKENS = {
    "DeepSeek": tuple(
        f"<{WIDE_BAR}{name}{WIDE_BAR}>" for name in ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant")
    ),
    "Mistral": ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"),
    "Kimi": ("[BOS]", "<|im_end|>", "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"),
}
"""By the first word of the family: the begin token, the end token, others."""


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
_COMPACT_DEEPSEEK_V31 = """\
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
    "deepseek_v31": _framed(_COMPACT_DEEPSEEK_V31.replace("|>", f"{WIDE_BAR}>").replace("<|", f"<{WIDE_BAR}")),
    "deepseek_v32": _framed(_DEEPSEEK_V32.replace("|DSML|", f"{WIDE_BAR}DSML{WIDE_BAR}")),
    "deepseek_v32, the prompt opens and closes thinking": _framed(
        _DEEPSEEK_V32.replace("|DSML|", f"{WIDE_BAR}DSML{WIDE_BAR}"), "<think></think>"
    ),
    "minimax_m2": _framed(_MINIMAX_M2, "<think>\\n"),
    "kimi_k2": _framed(_KIMI_K2),
    "mistral_args": _framed(_MISTRAL_ARGS),
    "harmony": _HARMONY,
}
"""By the format's name, and what else the template does."""
