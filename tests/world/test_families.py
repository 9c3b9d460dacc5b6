# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Supported families with their published chat templates and tokenizers: end tokens, masks, borders, continued turns.

Oracles are the pieces to train on written by hand (families.py), and the tokens that a rollout would have.
"""

import json
import re
from typing import Any

import pytest

from examples.published_packages import PACKAGES
from nemo_rl_moe.data.chat import MERGED, TokenizedExample
from nemo_rl_moe.data.continuation import Continuation
from nemo_rl_moe.data.preferences import load_preferences
from nemo_rl_moe.data.records import BadLine
from nemo_rl_moe.data.turn_spans import UNPROMPTED
from tests.world.conftest import Published
from tests.world.conversations import CALL, CONVERSATIONS, KINDS, assistant, record, user
from tests.world.families import FAMILIES, Family, Refused
from tests.world.other_templates import OtherTemplate, other_templates
from tests.world.spoken import ANEW, LONG, REFUSED, RIGHT, Spoken, runs
from tests.world.tokenizers import tokenizer_of

_CURE = re.compile(r"\b(?:policy|data|env)\.[a-z_.]+|leave|it works with")
_BY_NAME = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.row)


def spoken_of(family: Family, published: Published) -> Spoken:
    """Load a family's tokenizer and describe how its model speaks."""
    tokenizer = tokenizer_of(family, published)
    named = [tokenizer.convert_tokens_to_ids(text) for text in family.named]
    return Spoken(tokenizer, named, dict(family.kwargs))


_CACHE: dict[str, Spoken] = {}


@pytest.fixture
def spoken(family: Family, published: Published) -> Spoken:
    """A family's tokenizer, loaded once: some take seconds."""
    if family.row not in _CACHE:
        _CACHE[family.row] = spoken_of(family, published)
    return _CACHE[family.row]


@_BY_NAME
def test_stop_tokens(family: Family, spoken: Spoken) -> None:
    assert set(spoken.speech.stop_texts) == {*family.named, family.eos}
    assert spoken.speech.no_stops == ()


@_BY_NAME
@pytest.mark.parametrize("kind", KINDS)
def test_masks(family: Family, spoken: Spoken, kind: str) -> None:
    expected = family.spans[kind]
    found = spoken.tokenize(record(kind))
    if isinstance(expected, Refused):
        assert isinstance(found, BadLine), [spoken.tokenizer.decode(found.input_ids)]
        assert expected.reason in found.reason
        return
    assert isinstance(found, TokenizedExample), found
    pieces = runs(found.token_mask)
    assert tuple(spoken.tokenizer.decode(found.input_ids[first:end]) for first, end in pieces) == expected
    assert [piece for first, end in pieces for piece in found.input_ids[first:end]] == [
        token for span in expected for token in spoken.ids(span)
    ]


@_BY_NAME
@pytest.mark.parametrize("kind", KINDS)
def test_the_last_turn_follows_what_a_rollout_has(family: Family, spoken: Spoken, kind: str) -> None:
    if isinstance(family.spans[kind], Refused):
        pytest.skip("refused, as test_masks checks")
    found = spoken.tokenize(record(kind))
    assert isinstance(found, TokenizedExample)
    first, end = runs(found.token_mask)[-1]
    inputs = spoken.inputs(with_tools="tools" in record(kind))
    prompt = Continuation(spoken.tokenizer).begin(CONVERSATIONS[kind][:-1], inputs)
    before = found.input_ids[:first].tolist()
    before = found.input_ids[:first].tolist()
    if before != list(prompt.token_ids):
        # Of earlier turns, those that a rollout would have sampled; or the data lacks what the prompt opens.
        assert {MERGED, UNPROMPTED} & set(found.notes), spoken.tokenizer.decode(before)
        if UNPROMPTED not in found.notes:
            assert spoken.tokenizer.decode(before) == spoken.tokenizer.decode(prompt.token_ids)
    assert found.input_ids[end - 1] in spoken.speech.stop_token_ids


@_BY_NAME
def test_preferences(family: Family, spoken: Spoken, tmp_path: Any) -> None:
    chat = CONVERSATIONS["chat"]
    line = {"prompt": chat[:-1], "chosen": [chat[-1]], "rejected": [{"role": "assistant", "content": "REJ"}]}
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(line) + "\n", encoding="utf-8")
    pair = load_preferences(str(path), "train", spoken.tokenizer, LONG, run_wide=spoken.run_wide, speech=spoken.speech)[
        0
    ]
    expected = family.spans["chat"]
    assert not isinstance(expected, Refused)
    for response, sequence in (("ANS2 y", pair.chosen), ("REJ", pair.rejected)):
        ((first, end),) = runs(sequence.token_mask)
        assert spoken.tokenizer.decode(sequence.input_ids[first:end]) == expected[-1].replace("ANS2 y", response)


@_BY_NAME
def test_a_user_follows_a_plain_turn(family: Family, spoken: Spoken) -> None:
    """Extended tokens are those of the whole conversation, rendered afresh; or a sequence begins anew."""
    expected = family.spans["chat"]
    assert not isinstance(expected, Refused)
    outcome, text = spoken.followed(expected[-1], by_result=False)
    assert outcome == (RIGHT if family.user_appends else ANEW), text
    if outcome == RIGHT:
        turns = [user("USR1"), assistant("ANS2 y"), user("USR2")]
        afresh = Continuation(spoken.tokenizer).begin(turns, spoken.inputs(with_tools=False))
        assert text == spoken.tokenizer.decode(afresh.token_ids)


@_BY_NAME
def test_a_result_follows_a_call(family: Family, spoken: Spoken) -> None:
    spans = family.spans[CALL]
    if isinstance(spans, Refused) or family.tool_format is None:
        pytest.skip("the template shows no tools")
    outcome, text = spoken.followed(family.sampled_call or spans[0], by_result=True)
    assert outcome == (RIGHT if family.result_appends else ANEW), text
    if outcome == RIGHT and family.sampled_call is None:
        afresh = Continuation(spoken.tokenizer).begin(CONVERSATIONS[CALL][:-1], spoken.inputs(with_tools=True))
        assert text == spoken.tokenizer.decode(afresh.token_ids)


@_BY_NAME
def test_format_of_calls(family: Family, spoken: Spoken) -> None:
    name, reason = spoken.tool_format()
    assert name == (family.tool_format or REFUSED), reason


@pytest.mark.parametrize("template", list(other_templates()), ids=lambda template: template.name)
@pytest.mark.parametrize("kind", KINDS)
def test_other_templates_are_right_or_refused_with_a_cure(template: OtherTemplate, kind: str) -> None:
    outcome, reason = _other(template).mask(kind)
    assert outcome in (RIGHT, REFUSED), reason
    if outcome == REFUSED:
        assert _CURE.search(reason), reason


_OTHERS: dict[str, Spoken] = {}


def _other(template: OtherTemplate) -> Spoken:
    if template.name not in _OTHERS:
        (package,) = [package for package in PACKAGES if package.key == template.package]
        _OTHERS[template.name] = template.spoken(package.folder)
    return _OTHERS[template.name]
