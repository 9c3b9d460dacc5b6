# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Which tokens count in the loss, checked by hand for each way of finding them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_moe.data.chat import MERGED, batch_tokenizer, tokens_in_spans
from nemo_rl_moe.data.records import BadLine, parse_record
from nemo_rl_moe.errors import DataError
from tests.support.chat_templates import tokenize_example
from tests.unit.data.conftest import refused

CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CHATML_WITH_TAGS = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|end|>{% endgeneration %}{{ '\n' }}{% else %}{{ m.content }}<|end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
# As Qwen3's: a think block stands only in the last turn, and earlier turns lose theirs.
THINK_IN_LAST_TURN = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content.split('</think>')[-1] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
COUNTS_MESSAGES = "{{ messages | length }}:" + CHATML
HEADER_OF_ITS_OWN = CHATML.replace("{{ m.role }}", "{{ 'model' if m.role == 'assistant' else m.role }}", 1)
SHOWS_THE_ANSWER_BEFORE = "{{ messages[-1].content }}" + CHATML
ENDING_THAT_COUNTS = CHATML.replace("<|end|>", "{{ messages | length if m.role == 'assistant' else '' }}<|end|>")
TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "a1"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": "a2 \u00e9\U0001f600"},
]


def trained_pieces(tokenized, tokenizer):
    """The text of each run of trained tokens."""
    ids, mask = tokenized.input_ids, tokenized.token_mask
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return [tokenizer.decode(ids[a:b]) for a, b in edges.reshape(-1, 2)]


def tokenized(record, tokenizer, max_length=1000):
    return tokenize_example(parse_record(record, "f:1"), tokenizer, max_length)


def test_demo_tokenizer_by_hand(demo_tokenizer):
    result = tokenized({"prompt": "12+3=", "completion": "<think>2+3=5</think>15"}, demo_tokenizer)
    # pad, eos, <think>, </think>, 0-9, + - = ; and so on
    assert result.input_ids.tolist() == [5, 6, 14, 7, 16, 2, 6, 14, 7, 16, 9, 3, 5, 9, 1]
    assert result.token_mask.tolist() == [False] * 5 + [True] * 10
    assert (result.truncated, result.sample_id, result.num_trained_tokens()) == (False, "f:1", 10)
    assert demo_tokenizer.decode(result.input_ids) == "12+3=<think>2+3=5</think>15<eos>"


def test_demo_tokenizer_without_generation_tags_gives_the_same(demo_tokenizer):
    record = {"prompt": "12+3=", "completion": "<think>2+3=5</think>15"}
    expected = tokenized(record, demo_tokenizer)
    for tag in ("{%- generation -%}", "{%- endgeneration -%}"):
        demo_tokenizer.chat_template = demo_tokenizer.chat_template.replace(tag, "")
    found = tokenized(record, demo_tokenizer)
    assert found.input_ids.tolist() == expected.input_ids.tolist()
    assert found.token_mask.tolist() == expected.token_mask.tolist()


@pytest.mark.parametrize("template", [CHATML, CHATML_WITH_TAGS], ids=["prefixes", "tags"])
@pytest.mark.parametrize("trim_offsets", [False, True])
def test_multi_turn(byte_tokenizer, template, trim_offsets):
    tokenizer = byte_tokenizer(template, trim_offsets=trim_offsets)
    result = tokenized({"messages": TURNS}, tokenizer)
    assert trained_pieces(result, tokenizer) == ["a1<|end|>", "a2 \u00e9\U0001f600<|end|>"]
    assert tokenizer.decode(result.input_ids) == (
        "<|start|>system\ns<|end|>\n<|start|>user\nq1<|end|>\n<|start|>assistant\na1<|end|>\n"
        "<|start|>user\nq2<|end|>\n<|start|>assistant\na2 \u00e9\U0001f600<|end|>\n"
    )


ANSWERS = ["a1<|end|>", "a2 \u00e9\U0001f600<|end|>"]
OF_PROMPT = {"prompt": TURNS[:4], "completion": "done"}
IN_A_ROW = {"messages": [*TURNS[1:3], {"role": "assistant", "content": "more"}]}


@pytest.mark.parametrize(
    ("template", "record", "pieces"),
    [
        pytest.param(CHATML, OF_PROMPT, ["done<|end|>"], id="turns of the prompt are not trained on, by prefixes"),
        pytest.param(
            CHATML_WITH_TAGS, OF_PROMPT, ["done<|end|>"], id="turns of the prompt are not trained on, by tags"
        ),
        pytest.param(CHATML, IN_A_ROW, ["a1<|end|>", "more<|end|>"], id="two turns in a row"),
        pytest.param(COUNTS_MESSAGES, {"messages": TURNS}, ANSWERS, id="a template that counts messages"),
    ],
)
def test_pieces_that_are_trained_on(byte_tokenizer, template, record, pieces):
    tokenizer = byte_tokenizer(template)
    assert trained_pieces(tokenized(record, tokenizer), tokenizer) == pieces


def test_template_that_treats_the_last_turn_in_its_own_way(byte_tokenizer):
    tokenizer = byte_tokenizer(THINK_IN_LAST_TURN)
    turns = [*TURNS[1:4], {"role": "assistant", "content": "a2"}, {"role": "user", "content": "q3"}]
    result = tokenized({"messages": turns}, tokenizer)
    assert trained_pieces(result, tokenizer) == ["a1<|end|>", "a2<|end|>"]
    result = tokenized({"messages": turns[:4]}, tokenizer)
    assert trained_pieces(result, tokenizer) == ["a1<|end|>", "<think></think>a2<|end|>"]


def test_template_that_is_not_stable_is_an_error(byte_tokenizer):
    assert refused(tokenized, {"messages": TURNS}, byte_tokenizer(HEADER_OF_ITS_OWN)) == [
        "f:1: the tokens of turn 2 cannot be distinguished from the rest: with this chat template the turn opens with "
        "'<|end|>\\n<|start|>model\\n', and the generation prompt with '<|end|>\\n<|start|>assistant\\n'; "
        "set policy.tokenizer.chat_template to a template with {% generation %} tags"
    ]
    with pytest.raises(DataError, match=r"turn 2 .* the text of the turn or before the turn does not appear exactly"):
        tokenized({"messages": TURNS}, byte_tokenizer(SHOWS_THE_ANSWER_BEFORE))
    with pytest.raises(DataError, match=r"turn 2 .* rendered in another way when further turns follow"):
        tokenized({"messages": TURNS}, byte_tokenizer(ENDING_THAT_COUNTS))


NOTHING_SHOWN = "{{ messages[0].content }}{% generation %}{% endgeneration %}"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"template": "a\n{% for %}"}, "the chat template is not valid Jinja: line 2: "),
        ({"eos_token": None}, ".*neither a chat template nor an end token"),
        (
            {"template": "{{ raise_exception('roles must alternate') }}"},
            "f:1: the chat template refuses the conversation: roles must alternate; set ",
        ),
        ({"template": NOTHING_SHOWN}, "f:1: the chat template leaves no token of the assistant to train on$"),
    ],
)
def test_templates_without_a_token_to_train_on(byte_tokenizer, options, problem):
    with pytest.raises(DataError, match=f"^{problem}"):
        tokenized({"messages": TURNS}, byte_tokenizer(**options))


def test_no_token_reaches_over_the_border(byte_tokenizer):
    template = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    tokenizer = byte_tokenizer(template + "{% else %}{{ m.content }}{% endif %}{% endfor %}", merges=[("b", "c")])
    result = tokenized({"prompt": "ab", "completion": "cd"}, tokenizer)
    assert [tokenizer.decode([i]) for i in result.input_ids] == ["a", "b", "c", "d"]
    assert result.token_mask.tolist() == [False, False, True, True]
    assert result.notes == (MERGED,)


def test_plain_concatenation_without_a_template_opens_as_the_tokenizer_does(byte_tokenizer):
    from tokenizers.processors import TemplateProcessing

    plain = byte_tokenizer()
    result = tokenized({"prompt": "ab", "completion": "cd"}, plain)
    assert plain.decode(result.input_ids) == "abcd<|end|>"
    assert result.token_mask.tolist() == [False, False, True, True, True]
    tokenizer = byte_tokenizer(bos_token="<s>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.convert_tokens_to_ids("<s>"))]
    )
    result = tokenized({"prompt": "ab", "completion": "cd"}, tokenizer)
    assert tokenizer.decode(result.input_ids) == "<s>abcd<|end|>"
    assert result.token_mask.tolist() == [False, False, False, True, True, True]


def test_messages_without_a_template(byte_tokenizer):
    assert refused(tokenized, {"messages": TURNS}, byte_tokenizer()) == [
        "f:1: the example is a conversation, but the tokenizer has no chat template; "
        "set policy.tokenizer.chat_template, or give prompt and completion as strings"
    ]


def test_truncation(demo_tokenizer):
    record = {"prompt": "12+3=", "completion": "15"}
    whole = tokenized(record, demo_tokenizer, 8)
    assert (len(whole), whole.truncated, whole.num_trained_tokens()) == (8, False, 3)
    cut = tokenized(record, demo_tokenizer, 6)
    assert (len(cut), cut.truncated, cut.num_trained_tokens()) == (6, True, 1)
    nothing = tokenized(record, demo_tokenizer, 5)
    assert (len(nothing), nothing.truncated, nothing.num_trained_tokens()) == (5, True, 0)


def test_one_text_that_cannot_be_encoded_spoils_no_other(demo_tokenizer):
    records = [{"prompt": "1=", "completion": completion} for completion in ("1", "Z", "3")]
    first, bad, last = batch_tokenizer(demo_tokenizer, 10)([parse_record(r, f"f:{i}") for i, r in enumerate(records)])
    assert isinstance(bad, BadLine)
    assert str(bad).startswith("f:1: the tokenizer cannot encode the text: ")
    assert [demo_tokenizer.decode(item.input_ids) for item in (first, last)] == ["1=1<eos>", "1=3<eos>"]


@pytest.mark.parametrize("template", [CHATML, CHATML_WITH_TAGS], ids=["prefixes", "tags"])
def test_tokenizer_without_offsets(template):
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer(eos_token="<|end|>", extra_ids=0)
    tokenizer.chat_template = template
    result = tokenized({"messages": TURNS}, tokenizer)
    assert trained_pieces(result, tokenizer) == ["a1<|end|>", "a2 \u00e9\U0001f600<|end|>"]


def test_a_turn_that_ends_in_a_blank_ends_there(byte_tokenizer):
    """The library's own assistant mask has marked all that follows such a turn when the tokenizer trims offsets."""
    tokenizer = byte_tokenizer(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}",
        trim_offsets=True,
    )
    turns = [{"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "a "), ("user", "xyz"))]
    assert tokenized({"messages": turns}, tokenizer).token_mask.tolist() == [False, True, True, False, False, False]


def test_blank_tokens_whose_offsets_are_trimmed():
    # text "a b": the blank is trimmed to its end; it belongs to the span that holds character 1
    offsets = np.array([[0, 1], [2, 2], [2, 3]])
    assert tokens_in_spans(offsets, [(0, 1)]).tolist() == [True, False, False]
    assert tokens_in_spans(offsets, [(1, 3)]).tolist() == [False, True, True]
    assert tokens_in_spans(offsets, [(2, 3)]).tolist() == [False, False, True]
    assert tokens_in_spans(np.zeros((0, 2), dtype=np.int64), [(0, 1)]).tolist() == []


WORDS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\r"), min_size=1, max_size=6).filter(
    lambda text: text.strip() == text and text.isprintable()
)


@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4))
def test_both_ways_agree_and_mark_just_the_answers(byte_tokenizer_with_both_templates, turns):
    messages = [
        {"role": role, "content": text}
        for pair in turns
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    results = []
    for tokenizer in byte_tokenizer_with_both_templates:
        result = tokenized({"messages": messages}, tokenizer)
        assert trained_pieces(result, tokenizer) == [f"{answer}<|end|>" for _, answer in turns]
        results.append((result.input_ids.tolist(), result.token_mask.tolist()))
    assert results[0] == results[1]


@pytest.fixture(scope="module")
def byte_tokenizer_with_both_templates(byte_tokenizer):
    return byte_tokenizer(CHATML), byte_tokenizer(CHATML_WITH_TAGS)
