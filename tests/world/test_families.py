# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Supported families with their published chat templates and tokenizers: end tokens, masks, borders, continued turns.

Oracles are the pieces to train on written by hand (families.py), and the tokens that a rollout would have.
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nemo_rl_moe.data.chat import TokenizedExample, batch_tokenizer
from nemo_rl_moe.data.continuation import Continuation, SampledTurn
from nemo_rl_moe.data.corrected_templates import correct_template
from nemo_rl_moe.data.preferences import load_preferences
from nemo_rl_moe.data.records import BadLine, parse_record
from nemo_rl_moe.data.speech import Published as PublishedFiles
from nemo_rl_moe.data.speech import Speech, describe_speech
from nemo_rl_moe.data.template_inputs import TemplateInputs
from tests.world.conftest import Published
from tests.world.conversations import CALL, CONVERSATIONS, KINDS, TOOL, record, result, user
from tests.world.families import FAMILIES, Family, Refused
from tests.world.tokenizers import tokenizer_of

_BY_NAME = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
_LONG = 10_000


class Spoken:
    """A family's tokenizer as a run has it, and how the model speaks by its files."""

    def __init__(self, family: Family, published: Published):
        self.family = family
        self.tokenizer: Any = tokenizer_of(family, published)
        self.named = [self.tokenizer.convert_tokens_to_ids(text) for text in family.named]
        correct_template(self.tokenizer, "auto")
        self.speech: Speech = describe_speech(self.tokenizer, PublishedFiles({"eos_token_id": self.named}, {}))
        self.run_wide = TemplateInputs(kwargs=dict(family.kwargs))

    def tokenize(self, line: dict[str, Any]) -> TokenizedExample | BadLine:
        tokenize = batch_tokenizer(self.tokenizer, _LONG, self.run_wide, speech=self.speech)
        (found,) = tokenize([parse_record(json.loads(json.dumps(line)), "f:1")])
        return found

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


_CACHE: dict[str, Spoken] = {}


@pytest.fixture
def spoken(family: Family, published: Published) -> Iterator[Spoken]:
    """A family's tokenizer, loaded once: some take seconds."""
    if family.name not in _CACHE:
        _CACHE[family.name] = Spoken(family, published)
    return _CACHE[family.name]


def runs(mask: Any) -> list[tuple[int, int]]:
    """Return the first and the last place behind of each run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return [(int(first), int(end)) for first, end in edges.reshape(-1, 2)]


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
    inputs = TemplateInputs((TOOL,) if "tools" in record(kind) else (), spoken.run_wide.kwargs)
    prompt = Continuation(spoken.tokenizer).begin(CONVERSATIONS[kind][:-1], inputs)
    assert found.input_ids[:first].tolist() == list(prompt.token_ids), spoken.tokenizer.decode(found.input_ids[:first])
    assert found.input_ids[end - 1] in spoken.speech.stop_token_ids


@_BY_NAME
def test_preferences(family: Family, spoken: Spoken, tmp_path: Any) -> None:
    chat = CONVERSATIONS["chat"]
    line = {"prompt": chat[:-1], "chosen": [chat[-1]], "rejected": [{"role": "assistant", "content": "REJ"}]}
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(line) + "\n", encoding="utf-8")
    pair = load_preferences(
        str(path), "train", spoken.tokenizer, _LONG, run_wide=spoken.run_wide, speech=spoken.speech
    )[0]
    expected = family.spans["chat"]
    assert not isinstance(expected, Refused)
    for response, sequence in (("ANS2 y", pair.chosen), ("REJ", pair.rejected)):
        ((first, end),) = runs(sequence.token_mask)
        assert spoken.tokenizer.decode(sequence.input_ids[first:end]) == expected[-1].replace("ANS2 y", response)


@_BY_NAME
def test_a_user_follows_a_plain_turn(family: Family, spoken: Spoken) -> None:
    """The extended tokens are those of the whole conversation, rendered afresh."""
    continuation = Continuation(spoken.tokenizer)
    inputs = TemplateInputs(kwargs=spoken.run_wide.kwargs)
    begun = continuation.begin([user("USR1")], inputs)
    sampled = _without_prompted(family, "chat", spoken, begun.text)
    turn = SampledTurn(begun.messages, spoken.ids(sampled), spoken.speech.stop_token_ids, inputs, begun.text)
    found = continuation.extend(turn, [user("USR2")])
    afresh = continuation.begin([user("USR1"), {"role": "assistant", "content": "ANS2 y"}, user("USR2")], inputs)
    assert [*begun.token_ids, *turn.token_ids, *found.token_ids] == list(afresh.token_ids)


def _without_prompted(family: Family, kind: str, spoken: Spoken, prompt: str) -> str:
    spans = family.spans[kind]
    assert not isinstance(spans, Refused)
    return spans[-1]


@_BY_NAME
def test_a_result_follows_a_call(family: Family, spoken: Spoken) -> None:
    spans = family.spans[CALL]
    if isinstance(spans, Refused) or family.tool_format is None:
        pytest.skip("the template shows no tools")
    continuation = Continuation(spoken.tokenizer)
    inputs = TemplateInputs((TOOL,), spoken.run_wide.kwargs)
    begun = continuation.begin([user("USR1")], inputs)
    turn = SampledTurn(begun.messages, spoken.ids(spans[0]), spoken.speech.stop_token_ids, inputs, begun.text)
    found = continuation.extend(turn, [result(1, "RES1")])
    afresh = continuation.begin(CONVERSATIONS[CALL][:-1], inputs)
    whole = [*begun.token_ids, *turn.token_ids, *found.token_ids]
    assert spoken.tokenizer.decode(whole) == spoken.tokenizer.decode(afresh.token_ids)
