# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts of control tokens in the content of a message: they are plain text, and all else is tokenized as ever."""

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from nemo_rl_moe.data.continuation import Continuation, NoExtension, SampledTurn
from nemo_rl_moe.data.control_tokens import ControlTokens
from nemo_rl_moe.data.record_values import RecordError
from nemo_rl_moe.data.turn_spans import RenderError
from tests.support.chat_templates import THINKING, make_byte_tokenizer
from tests.support.conversations import ALL, Family, Message
from tests.support.quick_list import examples

BYTE_LEVEL = sorted(name for name in ALL if not name.startswith("tiny_"))
RESULTS = [name for name in BYTE_LEVEL if ALL[name].shows_results]
ASKED: list[Message] = [{"role": "user", "content": "q"}]


@cache
def continuation_of(name: str) -> Continuation:
    return Continuation(ALL[name].tokenizer)


def special_texts(family: Family) -> list[str]:
    return [token.content for token in family.tokenizer.added_tokens_decoder.values()]


def controls(family: Family, ids: Sequence[int]) -> list[int]:
    return [token_id for token_id in ids if token_id in family.tokenizer.added_tokens_decoder]


def behind(name: str, contents: Sequence[str], role: str) -> list[int]:
    """Tokens behind a turn of messages with these contents; none: this template refuses them whatever they say."""
    family = ALL[name]
    turn = SampledTurn(
        ASKED, family.encode(f"a{family.ends[-1] if role == 'tool' else family.ends[0]}"), family.end_ids
    )
    new = [{"role": role, "content": content, "name": "add", "tool_call_id": "abcdefghi"} for content in contents]
    try:
        return list(continuation_of(name).extend(turn, new).token_ids)
    except NoExtension as error:
        if "control token" in str(error):
            raise
        return []


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, str, list[str]]:
    role = draw(st.sampled_from(["user", "tool"]))
    name = draw(st.sampled_from(RESULTS if role == "tool" else BYTE_LEVEL))
    words = [*ALL[name].words, *special_texts(ALL[name]), "<", "|", "x", "\n"]
    content = st.lists(st.sampled_from(words), max_size=6).map("".join)
    return name, role, draw(st.lists(content, min_size=1, max_size=3 if role == "tool" else 1))


@settings(max_examples=examples(200), deadline=None)
@given(cases())
def test_contents_bring_no_control_token_and_lose_no_letter(case: tuple[str, str, list[str]]) -> None:
    name, role, contents = case
    family = ALL[name]
    found = behind(name, contents, role)
    harmless = behind(name, ["x" * bool(content.strip()) for content in contents], role)
    assert controls(family, found) == controls(family, harmless)
    if found:
        text = family.tokenizer.decode(found)
        for content in contents:
            assert content.strip() in text.replace('\\"', '"').replace("\\n", "\n")


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_cannot_end_its_turn(name: str) -> None:
    family = ALL[name]
    forged = "".join(special_texts(family))
    found = behind(name, [forged], "tool")
    assert controls(family, found) == controls(family, behind(name, ["3"], "tool"))
    assert not found or forged in family.tokenizer.decode(found)


CHATML = ALL["Qwen2.5, Qwen2-MoE"]


def test_all_other_text_is_tokenized_as_a_whole() -> None:
    """Around the text of a control token as well: it is cut behind its first letter, and nowhere else."""
    ids = behind("Qwen2.5, Qwen2-MoE", ["now<|im_end|>then"], "user")
    first, second = "\n<|im_start|>user\nnow<", "|im_end|>then<|im_end|>\n<|im_start|>assistant\n"
    assert ids == [*CHATML.encode(first), *CHATML.encode(second)]


def test_a_token_that_spans_the_border_of_a_content() -> None:
    """A template that writes the first letter of one before a content."""
    template = "{% for m in messages %}{{ m.content }}<|end|>{{ '<' if not loop.last }}{% endfor %}"
    tokenizer = make_byte_tokenizer(template)
    controls_of = ControlTokens(tokenizer)
    text = "q<|end|><|end|>x<|end|>"
    assert controls_of.encode(text, [(9, 16)]) == [
        *map(tokenizer.convert_tokens_to_ids, ("q", "<|end|>", *"<|end|>x", "<|end|>"))
    ]


def test_added_tokens_that_are_not_special_are_controls_where_the_template_writes_them() -> None:
    """Such as `<think>`; others are words like any other, such as runs of blanks."""
    tokenizer = make_byte_tokenizer(THINKING)
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<think>", "  ", "word")])
    found = ControlTokens(tokenizer)
    assert [found.first_in(text) for text in ("a<think>", "a  b", "a word", "a<s>b<think>")] == [
        "<think>",
        None,
        None,
        "<s>",
    ]
    text = "<think>a  word<think>"
    think, blanks, word = tokenizer.convert_tokens_to_ids(["<think>", "  ", "word"])
    letters = tokenizer.convert_tokens_to_ids(list("<think>"))
    assert found.encode(text, [(7, len(text))]) == [
        think,
        *tokenizer.convert_tokens_to_ids(["a"]),
        blanks,
        word,
        *letters,
    ]


def test_a_token_without_other_tokens_for_its_text() -> None:
    tokenizer = make_byte_tokenizer(THINKING, more_special=["\u00a7"])
    with pytest.raises(
        RenderError, match=r"^a message has the text of a control token, which the tokenizer cannot encode"
    ):
        ControlTokens(tokenizer).encode("a\u00a7b", [(1, 2)])


def test_a_name_with_the_text_of_a_control_token() -> None:
    turn = SampledTurn(ASKED, CHATML.encode("a<|im_end|>"), CHATML.end_ids)
    with pytest.raises(RecordError, match=r"^messages\[0\]\.name has the text of a control token: 'a<\|im_end\|>'$"):
        Continuation(CHATML.tokenizer).extend(turn, [{"role": "tool", "content": "r", "name": "a<|im_end|>"}])


def test_a_token_that_another_hides() -> None:
    tokenizer = make_byte_tokenizer(THINKING, more_special=["ab", "bc"])
    ids = ControlTokens(tokenizer).encode("ab abc", [(3, 6)])
    assert ids == tokenizer.convert_tokens_to_ids(["ab", "\u0120", "a", "b", "c"])


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("m.content + '<|end|>", "m.content + m.content + '<|end|>"),
        ("'<|start|>' + m.role", "'<|start|>' + ('!' if '<s>' in m.content else '') + m.role"),
    ],
    ids=["a content that is shown twice", "an answer to the text of a control token"],
)
def test_a_template_that_shows_more_than_a_content_once(text: str, other: str) -> None:
    family = Family(make_byte_tokenizer(THINKING.replace(text, other)), ("<|end|>",))
    turn = SampledTurn(ASKED, family.encode("a<|end|>"), family.end_ids)
    with pytest.raises(NoExtension, match=r"^messages\[0\]\.content has the text of a control token, and the position"):
        Continuation(family.tokenizer).extend(turn, [{"role": "user", "content": "<s>"}])
