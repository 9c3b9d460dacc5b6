# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Spans of published templates beside those of TRL's training variants: equal, or different as the table says."""

import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from nemo_rl_moe.data.turn_spans import Span
from tests.world.conftest import Published
from tests.world.conversations import Message
from tests.world.published_chats import CASES, TOOL, PublishedChat
from tests.world.trl_differences import TRL_DIFFERENCES, Difference

NUM_PAIRS = 31


def pairs(folder: Path) -> dict[str, tuple[Path, Path]]:
    """Published templates and their training variants, by name."""
    found = {file.stem.removesuffix("_training"): file for file in sorted(folder.glob("*_training.jinja"))}
    return {name: (folder / f"{name}.jinja", variant) for name, variant in found.items()}


def trl_spans(file: Path, case: str, names: Mapping[str, str]) -> tuple[str, list[Span]] | None:
    """The text and the spans of a training variant; None: it takes arguments neither as an object nor as a text."""
    tools = [TOOL] if case in ("tool", "calls") else None
    for of_arguments in (dict, json.dumps):
        messages: list[Message] = json.loads(json.dumps(CASES[case]))
        for message in messages:
            for call in message.get("tool_calls", []):
                call["function"]["arguments"] = of_arguments(call["function"]["arguments"])
        try:
            texts, spans = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=file.read_text(encoding="utf-8"),
                return_assistant_tokens_mask=True,
                add_generation_prompt=False,
                **names,
            )
        except Exception:
            continue
        return texts[0], [tuple(span) for span in spans[0]]
    return None


def alone(text: str, spans: list[Span], others: list[Span]) -> frozenset[str]:
    """Pieces of a text in some spans and in none of others, without blank space."""

    def covered(some: list[Span]) -> set[int]:
        return {place for first, end in some for place in range(first, end)}

    places = sorted(covered(spans) - covered(others))
    runs = [[place for _, place in run] for _, run in groupby(enumerate(places), lambda item: item[1] - item[0])]
    return frozenset(piece for run in runs if (piece := text[run[0] : run[-1] + 1].strip()))


def difference(published: PublishedChat, variant: Path, case: str) -> Difference | None:
    """What is different, without the reason; None: nothing."""
    names = {name: str(token) for name, token in published.tokenizer.special_tokens_map.items()}
    ours, trl = published.rendered(case), trl_spans(variant, case, names)
    if isinstance(ours, str) or trl is None:
        assert isinstance(ours, str), f"TRL refuses what we take: {case}"
        return None if trl is None else Difference("", is_refused=True)
    text, spans = trl
    if text != ours.text:
        return Difference("", is_other_text=True)
    found = Difference("", alone(text, spans, list(ours.spans)), alone(text, list(ours.spans), spans))
    return found if found != Difference("") else None


@pytest.fixture(scope="module")
def found(published: Published) -> dict[str, dict[str, Difference | None]]:
    return {
        name: {case: difference(PublishedChat.read(base), variant, case) for case in CASES}
        for name, (base, variant) in pairs(published("trl")).items()
    }


def test_each_difference_is_in_the_table_and_nothing_else_is(found: dict[str, dict[str, Difference | None]]) -> None:
    differences = {
        (name, case): each for name, cases in found.items() for case, each in cases.items() if each is not None
    }
    explained = {
        (name, case): Difference("", each.trl_alone, each.ours_alone, each.is_refused, each.is_other_text)
        for name, cases in TRL_DIFFERENCES.items()
        for case, each in cases.items()
    }
    assert differences == explained
    assert len(found) == NUM_PAIRS
