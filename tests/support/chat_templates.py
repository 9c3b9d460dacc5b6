# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Chat templates without `{% generation %}` tags, each with the structure of a published family's, and their tokenizer.

Their special tokens are `<|start|>`, `<|end|>` and `<s>`, which the byte-level tokenizer of the tests has.
"""

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import ByteLevel as ByteLevelProcessor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nemo_rl_moe.data.chat import TokenizedExample, batch_tokenizer
from nemo_rl_moe.data.records import BadLine, Example
from nemo_rl_moe.errors import DataError

SPECIAL = ("<|start|>", "<|end|>", "<s>")


def make_byte_tokenizer(
    template: str | Mapping[str, str] | None = None,
    merges: Sequence[tuple[str, str]] = (),
    trim_offsets: bool = False,
    more_special: Sequence[str] = (),
    **special: str | None,
) -> PreTrainedTokenizerBase:
    """Return one token a byte, then the merges, then `<|start|>`, `<|end|>` (the end token) and `<s>`.

    Args:
        template: The chat template.
        merges: Pairs of pieces that make one token.
        trim_offsets: Blanks at the borders of a token do not count as its characters.
        more_special: Texts that are one token too.
        special: Further arguments of transformers, such as `eos_token`.
    """
    pieces = [*sorted(ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(BPE({piece: index for index, piece in enumerate(pieces)}, list(merges)))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.post_processor = ByteLevelProcessor(trim_offsets=trim_offsets)
    tokenizer.add_special_tokens([*SPECIAL, *more_special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=template, **{"eos_token": "<|end|>", **special}
    )


def tokenize_example(example: Example, tokenizer, max_length: int) -> TokenizedExample:
    (result,) = batch_tokenizer(tokenizer, max_length)([example])
    if isinstance(result, BadLine):
        raise DataError(str(result))
    return result


# As Qwen3's: thinking is kept behind the last question only, the last turn always opens a think block, tools stand in a
# system turn, their results in a user turn, and `enable_thinking` closes the block in the generation prompt.
THINKING = """\
{%- if tools %}
    {{- '<|start|>system\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- '<|end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_question=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last_question = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set content = m.content %}
        {%- set thinking = '' %}
        {%- if m.reasoning_content is defined %}
            {%- set thinking = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thinking = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_question and (loop.last or thinking) %}
            {{- '<think>\\n' + thinking + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {%- if not loop.first or content %}{{- '\\n' }}{%- endif %}
            {{- '<call>' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson + '</call>' }}
        {%- endfor %}
        {{- '<|end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|start|>user' }}{%- endif %}
        {{- '\\n<result>' + m.content + '</result>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|start|>' + m.role + '\\n' + m.content + '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# As Qwen3's of July 2025 that always think: the generation prompt opens a think block.
THINKING_ALWAYS = THINKING.replace(
    """{{- '<|start|>assistant\\n' }}
    {%- if enable_thinking""",
    """{{- '<|start|>assistant\\n<think>\\n' }}
    {%- if enable_thinking""",
)

# As DeepSeek's: the generation prompt opens a think block that no turn of the conversation has, a turn that calls tools
# is one whose content is null, arguments are a string that is put in between, and after results there is no header.
PROMPT_OPENS_THINKING = """\
{%- set ns = namespace(is_tool=false) %}
{{- '<s>' }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{- m.content }}{%- endif %}
    {%- if m.role == 'user' %}{%- set ns.is_tool = false %}{{- '<User>' + m.content }}{%- endif %}
    {%- if m.role == 'assistant' and m.content is none %}
        {%- set ns.is_tool = false %}
        {%- for call in m.tool_calls %}
            {{- '<Assistant><call>' if loop.first else '\\n<call>' }}
            {{- call.function.name + '\\n' + call.function.arguments + '</call>' }}
        {%- endfor %}
        {{- '<|end|>' }}
    {%- endif %}
    {%- if m.role == 'assistant' and m.content is not none %}
        {{- ('</results>' if ns.is_tool else '<Assistant>') + m.content.split('</think>')[-1] + '<|end|>' }}
        {%- set ns.is_tool = false %}
    {%- endif %}
    {%- if m.role == 'tool' %}
        {{- ('\\n' if ns.is_tool else '<results>') + '<result>' + m.content + '</result>' }}
        {%- set ns.is_tool = true %}
    {%- endif %}
{%- endfor %}
{%- if ns.is_tool %}{{- '</results>' }}{%- endif %}
{%- if add_generation_prompt and not ns.is_tool %}{{- '<Assistant><think>\\n' }}{%- endif %}
"""

# As Nemotron 3's: the generation prompt opens a think block, an answer whose content has no `<think>` gets an empty one
# unless it has the end of one, and thinking is kept behind the last question only.
OPENS_AND_KEEPS_THINKING = """\
{%- set ns = namespace(last_question=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last_question = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set content = m.content %}
        {%- if '<think>' not in content and '</think>' not in content %}
            {%- set content = '<think></think>' + content %}
        {%- elif loop.index0 < ns.last_question %}
            {%- set content = '<think></think>' + content.split('</think>')[-1] %}
        {%- endif %}
        {{- '<|start|>assistant\\n' + content | trim + '<|end|>\\n' }}
    {%- else %}
        {{- '<|start|>' + m.role + '\\n' + m.content + '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n<think>\\n' }}{%- endif %}
"""

# As OLMoE's: a newline stands behind an answer only where another turn follows, so not before the generation prompt.
NEWLINE_BETWEEN_TURNS = """\
{{- '<s>' }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<assistant>\\n' + m.content + '<|end|>' + ('' if loop.last else '\\n') }}
    {%- else %}
        {{- '<' + m.role + '>\\n' + m.content + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<assistant>\\n' }}{%- endif %}
"""

# As gpt-oss's: channels, of which the generation prompt names none; the last turn ends with another token than earlier
# ones, thinking is kept in the last turn alone, what a call says before it only until an answer follows, and of several
# calls only the first is shown.
CHANNELS = """\
{%- if tools %}
    {{- '<|start|>developer\\n' }}{% for tool in tools %}{{- tool.function | tojson }}{% endfor %}{{- '<s>' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {%- if m.content and m.thinking %}{{- raise_exception('content and thinking') }}{%- endif %}
        {%- set ns = namespace(answered=false) %}
        {%- for later in messages[loop.index:] %}
            {%- if later.role == 'assistant' and not later.tool_calls %}{%- set ns.answered = true %}{%- endif %}
        {%- endfor %}
        {%- if (m.content or m.thinking) and not ns.answered %}
            {{- '<|start|>assistant[analysis]' + (m.content or m.thinking) + '<s>' }}
        {%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start|>assistant to=' + call.name + '[commentary]' + call.arguments | tojson + '<call>' }}
    {%- elif m.role == 'assistant' %}
        {%- if loop.last and not add_generation_prompt %}
            {%- if m.thinking %}{{- '<|start|>assistant[analysis]' + m.thinking + '<s>' }}{%- endif %}
            {{- '<|start|>assistant[final]' + m.content + '<|end|>' }}
        {%- else %}
            {{- '<|start|>assistant[final]' + m.content + '<s>' }}
        {%- endif %}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>tool to=assistant[commentary]' + m.content | tojson + '<s>' }}
    {%- else %}
        {{- '<|start|>' + m.role + '[]' + m.content + '<s>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""

# As GLM's: the mark of the next role ends a turn, and nothing the last one.
CLOSED_BY_NEXT_ROLE = """\
{%- if tools %}<|system|>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}{{- '<|observation|>\\n' + m.content }}
    {%- elif m.role == 'assistant' %}
        {{- '<|assistant|>\\n' + (m.content or '') }}
        {%- for call in m.tool_calls or [] %}
            {{- '<tool_call>' + call.function.name }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
                {{- (value if value is string else value | tojson) + '</arg_value>' }}
            {%- endfor %}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
    {%- else %}{{- '<|' + m.role + '|>\\n' + m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{% endif %}
"""

# As GLM-4.7's, Nemotron 3's and DeepSeek-V3.2's: the generation prompt opens a think block (OPENED), which turns of the
# conversation have only behind the last question and only with thinking; otherwise they have what EMPTY is.
_THINK_BLOCKS = """\
{%- set ns = namespace(last_question=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last_question = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {{- '<|start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}
        {%- if m.reasoning_content and loop.index0 > ns.last_question %}
            {{- '<think>\\n' + m.reasoning_content + '</think>' }}
        {%- else %}{{- 'EMPTY' }}{%- endif %}
        {{- m.content or '' }}
        {%- for call in m.tool_calls or [] %}
            {{- '<call>' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson + '</call>' }}
        {%- endfor %}
    {%- else %}{{- m.content }}{%- endif %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n' + ('EMPTY' if enable_thinking is false else 'OPENED') }}
{%- endif %}
"""


def with_think_blocks(empty: str, opened: str) -> str:
    """Return a template whose turns without thinking and whose generation prompt hold these, in Jinja's quotes."""
    return _THINK_BLOCKS.replace("EMPTY", empty).replace("OPENED", opened)
