# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Chat templates that nobody has thought of, through `data`: reported in a line, or shown as transformers renders
them."""

import json
import random
import re
from functools import cache
from pathlib import Path

import pytest

from nemo_rl_moe.data.template_process import template_process
from nemo_rl_moe.data.tokenizer import load_tokenizer
from nemo_rl_moe.errors import printable
from tests.conftest import REPOSITORY_ROOT
from tests.support.byte_tokenizer import make_byte_tokenizer
from tests.support.chat_templates import CHANNELS, PROMPT_OPENS_THINKING, THINKING
from tests.support.fuzzing import Case, Output, command, fuzz
from tests.support.mutations import mutated_bytes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

CHATML = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"  # noqa: E501
TAGGED = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}\n{% endfor %}"
)
WHOLE = (CHATML, CHATML, TAGGED, TAGGED, THINKING, PROMPT_OPENS_THINKING, CHANNELS)
# Each stands somewhere among the statements of a whole template.
PIECES = (
    "{{ 1 // 0 }}",
    "{{ 10.0 ** 400 }}",
    "{% for i in range(300) %}{{ i }}{% endfor %}",
    "{{ range(10 ** 9) | list }}",
    "{{ range(99999) | list }}",
    "{{ range(99999) | map('string') | join }}",
    "{{ 'x' * 10 ** 6 }}",
    "{{ ('x' * 999) | wordwrap(1) }}",
    "{{ 'a' | center(10 ** 7) }}",
    "{{ '%9999d' % 1 }}",
    "{{ '%*d' % (10 ** 9, 1) }}",
    "{{ '{:>999}'.format(1) }}",
    "{{ ('a' * 9999) | urlize }}",
    "{{ messages | tojson(indent=4) }}",
    "{{ messages | pprint }}",
    "{{ messages }}",
    "{{ none }}{{ [] }}{{ {} }}{{ 1.5 }}{{ true }}",
    "{{ undefined_name }}",
    "{{ undefined_name.attribute }}",
    "{{ messages[99].content }}",
    "{{ messages[0].content.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ lipsum(n=50) }}",
    "{{ lipsum.__globals__['os'].system('touch planted') }}",
    "{{ joiner }}{{ namespace(a=1) }}{{ dict(a=1) }}",
    "{{ messages.clear() }}",
    "{{ messages.append(messages) }}",
    "{% set _ = messages[0].update({'content': 'other'}) %}",
    "{% set ns = namespace(n=0) %}{% for i in range(99999) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
    "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(50) }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{% include 'a' %}",
    "{% include messages[0].content %}",
    "{% import 'a' as a %}",
    "{% from 'a' import b %}",
    "{% extends 'a' %}",
    "{% block a %}{% endblock %}",
    "{% break %}",
    "{% continue %}",
    "{% generation %}x{% endgeneration %}",
    "{% generation %}",
    "{% generation %}{% generation %}x{% endgeneration %}{% endgeneration %}",
    "{% for i in range(3) %}{% generation %}{% endgeneration %}{% endfor %}",
    "{% raw %}{{ messages }}{% endraw %}",
    "{% filter upper %}a{% endfilter %}",
    "{% autoescape true %}<{% endautoescape %}",
    "{% do messages.pop() %}",
    "{% debug %}",
    "{% trans %}a{% endtrans %}",
    "{% call m() %}{% endcall %}",
    "{% with a = 1 %}{{ a }}{% endwith %}",
    "{# a comment #}",
    "{#",
    "{{ raise_exception('no') }}",
    "{{ raise_exception('\x1b]0;title\x07' * 999) }}",
    "{{ raise_exception(messages) }}",
    "{{ raise_exception() }}",
    "{{ strftime_now('%d') | length }}",
    "{{ strftime_now('%' * 999) | length }}",
    "{{ strftime_now() }}",
    "\x1b[2J\r\x07\x00",
    "\u202e\u2028\ufeff\U000e0001",
    "{{ '\\ud800' }}",
    "{{ '\\x1b[31m' }}",
    "{{ '\\u0000' }}",
    "{{ messages[0].content | batch(0) | list }}",
    "{{ messages | groupby('role') }}",
    "{{ messages | sum(attribute='role') }}",
    "{{ 'a' | attr('__class__') }}",
    "{{ 'a' | int(default=messages) }}",
    "{{ 'a'.encode('idna') }}",
    "{{ 'a' | truncate(-1) }}",
    "{{ 'a' | indent(99999) }}",
    "{{ 5 | round(-(10 ** 9)) }}",
    "{{ 'a' | replace('', 'b' * 999) }}",
    "{{ tools.x.y }}",
    "{{ add_generation_prompt.x }}",
    "{{ eos_token * 99 }}",
    "{{ bos_token }}",
)
RECORDS = (
    {"messages": [{"role": "user", "content": "how much?"}, {"role": "assistant", "content": "three"}]},
    {
        "messages": [
            {"role": "user", "content": "first"},
            {"role": "assistant", "content": "one"},
            {"role": "user", "content": "second"},
            {"role": "assistant", "content": "two"},
        ]
    },
)
NEWS = re.compile(r"^(\S+\.jsonl):(\d): \d.*$", re.MULTILINE)


@cache
def tokenizer_folder() -> Path:
    """Made once in a process, with the process that renders templates: it takes a second to start."""
    from tempfile import mkdtemp

    folder = Path(mkdtemp(prefix="fuzz_tokenizer_"))
    make_byte_tokenizer().save_pretrained(folder)
    tokenizer_folder.process = template_process()  # type: ignore[attr-defined]
    return folder


def _mixed(generator: random.Random, whole: str) -> tuple[str, str]:
    """A whole template with pieces between its statements."""
    parts = re.split(r"(?=\{%|\{\{)|(?<=%\}|\}\})", whole)
    pieces = [generator.choice(PIECES) for _ in range(generator.choice([1, 1, 1, 2, 3]))]
    for piece in pieces:
        parts.insert(generator.choice([0, generator.randrange(len(parts) + 1)]), piece)
    return "".join(parts), repr(pieces)


def chat_templates(generator: random.Random, folder: Path) -> Case:
    whole = generator.choice(WHOLE)
    how = generator.randrange(10)
    if how < 6:
        template, what = _mixed(generator, whole)
    elif how < 8:
        content, what = mutated_bytes(generator, whole.encode())
        template = content.decode(errors="replace" if how == 6 else "surrogateescape")
    elif how == 8:
        template = what = generator.choice(
            ["", " ", "{{", "{% for %}", "x" * 10**6, "{{ 1 }}" * 9999, "{{ " + "(" * 999 + "1" + ")" * 999 + " }}"]
        )
    else:
        template = what = "".join(generator.choice(PIECES) for _ in range(4))
    path = folder / "template.jinja"
    path.write_bytes(template.encode(errors="surrogateescape"))
    data = folder / "train.jsonl"
    data.write_text("".join(f"{json.dumps(record)}\n" for record in RECORDS))

    def difference(output: Output) -> str | None:
        if list(folder.rglob("planted")) or Path("planted").exists():
            return "the template has run a program"
        # The clock's, or what transformers renders without limits: Jinja computes constants that are never shown.
        if "strftime" in template or "10 **" in template or "truncated\n" in output.printed:
            return None
        tokenizer = load_tokenizer(str(tokenizer_folder()), str(path))
        heads = [*NEWS.finditer(output.printed)]
        for match, following in zip(heads, [*heads[1:], None], strict=True):
            shown = output.printed[match.end() + 1 : following.start() - 1 if following else None].rstrip("\n")
            record = RECORDS[int(match[2]) - 1]
            text = tokenizer.apply_chat_template(json.loads(json.dumps(record["messages"])), tokenize=False)
            expected = printable(tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"])).rstrip("\n")
            if shown.replace("[[", "").replace("]]", "") != expected.replace("[[", "").replace("]]", ""):
                return f"shown is {shown[:300]!r}, and transformers renders {expected[:300]!r}"
        return None

    model = REPOSITORY_ROOT / "examples/assets/tiny_qwen3_moe"
    run = command(
        *("data", "--config", "sft_tiny_moe.yaml", "--show", "5", f"data.train.path={data}", "data.validation=null"),
        *(f"policy.model_name={model}", f"policy.tokenizer.name={tokenizer_folder()}", "data.load_timeout_s=100"),
        *(f"policy.tokenizer.chat_template={path}", "policy.max_total_sequence_length=30000"),
        f"data.on_bad_line={generator.choice(['stop', 'skip'])}",
    )
    return Case(what, run, difference)


def test_templates(tmp_path: Path) -> None:
    fuzz(chat_templates, tmp_path)
