# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The search tool: ranking, any query, and files that cannot be used."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.tools.local_search import PASSAGE_CHARACTERS, main, make_corpus, search

ARTICLES = (
    {"title": "Nile", "text": "The Nile is a river in Africa. It flows north."},
    {"title": "Congo", "text": "The Congo is the deepest river. It flows through Africa, the river of rivers."},
    {"title": "", "text": "Bread is baked of flour and water."},
    {"title": "Long", "text": "filler " * 500},
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("corpus")
    lines = folder / "articles.jsonl"
    lines.write_text("".join(json.dumps(article) + "\n" for article in ARTICLES), "utf-8")
    assert make_corpus(lines, folder / "articles.sqlite") == len(ARTICLES)
    assert {path.name for path in folder.iterdir()} == {"articles.jsonl", "articles.sqlite"}
    return str(folder / "articles.sqlite")


def test_the_best_passage_is_first(corpus: str) -> None:
    found = search("deepest rivers", corpus=corpus)
    assert found.startswith("[1] Congo\nThe Congo is the deepest river.")
    assert "[2] Nile\n" in found
    assert search("deepest rivers", 1, corpus=corpus).count("[") == 1


def test_a_passage_without_a_title_and_a_long_one(corpus: str) -> None:
    assert search("flour", corpus=corpus) == "[1] Bread is baked of flour and water."
    assert search("filler", corpus=corpus) == "[1] Long\n" + ("filler " * 500)[:PASSAGE_CHARACTERS].rstrip() + " ..."


def test_nothing_found_is_said(corpus: str) -> None:
    assert search("volcano", corpus=corpus) == "no passage has one of these words"
    assert search(" ?! ", corpus=corpus) == "error: the query has no words"


@given(query=st.text(max_size=60), num_results=st.integers(-5, 100))
def test_any_query_gets_an_answer(corpus: str, query: str, num_results: int) -> None:
    assert search(query, num_results, corpus=corpus)


@pytest.mark.parametrize("query", ['"', "NEAR(a b)", "title:Nile AND", "Nile*", "river OR"])
def test_operators_of_the_database_are_words(corpus: str, query: str) -> None:
    assert not search(query, corpus=corpus).startswith("error") or query == '"'


def test_files_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.jsonl").write_text('{"title": "no text"}\n', "utf-8")
    assert main([str(tmp_path / "bad.jsonl"), str(tmp_path / "out.sqlite")]) == 2
    assert capsys.readouterr().err == (f"error: {tmp_path}/bad.jsonl:1: text: expected a text that is not empty\n")
    assert main([str(tmp_path / "none.jsonl"), str(tmp_path / "out.sqlite")]) == 2
    assert "none.jsonl: No such file or directory" in capsys.readouterr().err
    assert not (tmp_path / "out.sqlite").exists()
    with pytest.raises(DataError, match="cannot be searched"):
        search("river", corpus=str(tmp_path / "bad.jsonl"))
    with pytest.raises(DataError, match=re.escape("make it with python -m nemo_rl_moe.tools.local_search")):
        search("river", corpus=str(tmp_path / "none.sqlite"))
