# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A tool that searches a local corpus, a file for SQLite's full-text search (FTS5), and ranks passages by BM25.

    python -m nemo_rl_moe.tools.local_search articles.jsonl articles.sqlite

makes this file from lines such as `{"title": "Nile", "text": "The Nile is a river in Africa."}`.
"""

import argparse
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import cache
from pathlib import Path

from nemo_rl_moe.config.schema_base import PathText
from nemo_rl_moe.data.record_values import RecordError
from nemo_rl_moe.data.records import BadLine
from nemo_rl_moe.data.text_files import read_jsonl
from nemo_rl_moe.errors import EXIT_BAD_INPUT, DataError, UserError

MOST_WORDS = 50
"""Maximum number of words of a query that are used."""
MOST_RESULTS = 10
PASSAGE_CHARACTERS = 600
_TABLE = "passages"


def search(query: str, num_results: int = 3, *, corpus: PathText) -> str:
    """Search the corpus and return the best passages.

    Args:
        query: Words to look for.
        num_results: How many passages to return, at most 10.
        corpus: File that this module has made.
    """
    words = "".join(character if character.isalnum() else " " for character in query).split()[:MOST_WORDS]
    if not words:
        return "error: the query has no words"
    # Quoted, because AND, OR and NOT are operators of FTS5.
    any_word = " OR ".join(f'"{word}"' for word in words)
    rows = _opened(corpus).execute(
        f"SELECT title, text FROM {_TABLE} WHERE {_TABLE} MATCH ? ORDER BY bm25({_TABLE}), rowid LIMIT ?",
        (any_word, max(1, min(num_results, MOST_RESULTS))),
    )
    passages = [f"[{number}] {_passage(*row)}" for number, row in enumerate(rows, start=1)]
    return "\n\n".join(passages) or "no passage has one of these words"


def make_corpus(articles: Path, corpus: Path) -> int:
    """Write the file that `search` reads, and return the number of its passages.

    Args:
        articles: JSONL file with the keys `text` and, if articles have titles, `title`.
    """
    staging = corpus.with_name(f".{corpus.name}.incomplete")
    staging.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(staging)) as connection, connection:
            connection.execute(f"CREATE VIRTUAL TABLE {_TABLE} USING fts5(title, text, tokenize = 'porter unicode61')")
            connection.executemany(f"INSERT INTO {_TABLE} VALUES (?, ?)", _articles(articles))
            count = int(connection.execute(f"SELECT count(*) FROM {_TABLE}").fetchone()[0])
        staging.replace(corpus)
    except sqlite3.Error as error:
        raise DataError(f"{corpus}: cannot be written: {error}") from error
    except OSError as error:
        raise DataError(f"{error.filename or articles}: {error.strerror}") from error
    finally:
        staging.unlink(missing_ok=True)
    return count


def main(arguments: list[str] | None = None) -> int:
    """Make a corpus, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m nemo_rl_moe.tools.local_search", description="Makes the corpus of the tool `search`."
    )
    parser.add_argument("articles", type=Path, help='JSONL with lines such as {"title": "Nile", "text": "A river."}')
    parser.add_argument("corpus", type=Path, help="the file to write")
    chosen = parser.parse_args(arguments)
    try:
        count = make_corpus(chosen.articles, chosen.corpus)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    print(f"{chosen.corpus}: wrote {count:,} passages")
    return 0


def _passage(title: str, text: str) -> str:
    shown = text if len(text) <= PASSAGE_CHARACTERS else f"{text[:PASSAGE_CHARACTERS].rstrip()} ..."
    return f"{title}\n{shown}" if title else shown


@cache
def _opened(corpus: str) -> sqlite3.Connection:
    try:
        connection = sqlite3.connect(f"{Path(corpus).resolve().as_uri()}?mode=ro", uri=True)
        connection.execute(f"SELECT title, text FROM {_TABLE} LIMIT 1").fetchone()
    except sqlite3.Error as error:
        raise DataError(
            f"{corpus}: cannot be searched ({error}); make it with python -m nemo_rl_moe.tools.local_search"
        ) from error
    return connection


def _articles(path: Path) -> Iterator[tuple[str, str]]:
    for article in read_jsonl(path, _parse):
        if isinstance(article, BadLine):
            raise DataError(str(article))
        yield article


def _parse(record: object, sample_id: str) -> tuple[str, str]:
    if not isinstance(record, Mapping):
        raise RecordError(f"expected an object, got {type(record).__name__}")
    title, text = record.get("title", ""), record.get("text")
    if not isinstance(text, str) or not text.strip():
        raise RecordError("text: expected a text that is not empty")
    if not isinstance(title, str):
        raise RecordError("title: expected a text")
    return title, text


if __name__ == "__main__":
    sys.exit(main())
