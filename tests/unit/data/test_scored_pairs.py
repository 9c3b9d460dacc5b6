# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Pairs of a reward model: margins of records, and the token at which a sequence is scored."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nemo_rl_moe.data.chat import TokenizedExample
from nemo_rl_moe.data.margins import MARGINS, Margins
from nemo_rl_moe.data.preferences import PreferenceDataset, PreferencePair, load_preferences
from nemo_rl_moe.data.scored_pairs import collate_scored_pairs, scored_length, up_to_score
from nemo_rl_moe.data.tokenizer import load_tokenizer
from nemo_rl_moe.errors import DataError

MODEL = Path(__file__).resolve().parents[3] / "examples/assets/tiny_qwen3_moe"
PAD, END = 0, 1


def load(path: Path, margins: Margins | None) -> PreferenceDataset:
    return load_preferences(str(path), "train", load_tokenizer(str(MODEL)), 64, margins=margins)


def write(path: Path, *more: dict[str, Any]) -> Path:
    records = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "99", **extra} for n, extra in enumerate(more)]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def margins_in(dataset: PreferenceDataset) -> list[float | None]:
    return [pair.margin for pair in dataset]


def test_margins_are_read_only_when_they_are_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", {"margin": 2}, {"margin": -0.5})
    assert margins_in(load(path, Margins(None))) == [2.0, -0.5]
    assert margins_in(load(path, None)) == [None, None]
    without = write(tmp_path / "without.jsonl", {}, {})
    assert margins_in(load(without, Margins(None))) == [None, None]
    named = write(tmp_path / "named.jsonl", {"scores": {"gap": 3.0}}, {"scores": {"gap": 1}})
    assert margins_in(load(named, Margins("scores.gap"))) == [3.0, 1.0]


def test_margins_of_a_table(tmp_path: Path) -> None:
    table = {
        "prompt": ["1+1=", "1+2="],
        "chosen": ["2", "3"],
        "rejected": ["5", "6"],
        "margin": [1.5, 0.0],
        "x": [1, 2],
    }
    pq.write_table(pa.table(table), tmp_path / "pairs.parquet")
    assert margins_in(load(tmp_path, Margins(None))) == [1.5, 0.0]
    with pytest.raises(DataError, match=r"has no column 'gap' \(data\.margin_key=gap\)"):
        load(tmp_path, Margins("gap"))


@pytest.mark.parametrize(
    ("key", "records", "line"),
    [
        (None, ({"margin": "big"},), "margin is a string, expected a number; to use another key, set data.margin_key"),
        (None, ({"margin": True},), "margin is a boolean, expected a number"),
        (None, ({"margin": 1.0}, {}), "the line has no margin where"),
        ("gap", ({"gap": 1.0}, {}), "the line has no gap (data.margin_key=gap)"),
        ("gap", ({"gap": None},), "gap is null, expected a number"),
    ],
)
def test_margins_that_cannot_be_used(
    tmp_path: Path, key: str | None, records: tuple[dict[str, Any], ...], line: str
) -> None:
    path = write(tmp_path / "pairs.jsonl", *records)
    with pytest.raises(DataError) as caught:
        load(path, Margins(key))
    assert line in str(caught.value)


@pytest.mark.parametrize("margin", ["1e999", "-1e7", "1" + 400 * "0", "NaN"])
def test_margins_that_are_no_differences_of_scores_are_refused(tmp_path: Path, margin: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(f'{{"prompt": "1+1=", "chosen": "2", "rejected": "3", "margin": {margin}}}\n')
    with pytest.raises(DataError) as caught:
        load(path, Margins(None))
    line, _ = str(caught.value).splitlines()
    assert line.endswith(", expected a number from -1000000 to 1000000")
    assert len(line) < len(str(path)) + 250


@pytest.mark.parametrize(
    ("ids", "pad", "length"),
    [
        ([5, 6, 1], 0, 3),
        ([5, 6, 0, 0], 0, 2),
        ([5, 0, 6, 0], 0, 3),
        ([0, 0], 0, 1),
        ([5, 0], None, 2),
        ([5, 1, 1], 1, 1),
    ],
)
def test_the_score_is_at_the_last_token_that_is_not_padding(ids: list[int], pad: int | None, length: int) -> None:
    assert scored_length(np.array(ids), pad) == length


def example(ids: list[int], mask: list[int]) -> TokenizedExample:
    return TokenizedExample(np.array(ids, np.int32), np.array(mask, np.bool_), False, "one")


@pytest.mark.parametrize(
    ("ids", "mask", "pad", "expected"),
    [
        # After the last turn of the assistant the template has written a line break.
        ([5, 6, 7, END, 9], [0, 0, 1, 1, 0], PAD, ([5, 6, 7, END], [0, 0, 1, 1])),
        # The end token is the padding token, which transformers does not score.
        ([5, 6, 7, END], [0, 0, 1, 1], END, ([5, 6, 7], [0, 0, 1])),
        # A response that is an end token alone: the prompt's last token has the score, and the pair still counts.
        ([5, 6, END], [0, 0, 1], END, ([5, 6], [0, 1])),
        ([5, 6, 7], [0, 0, 1], None, ([5, 6, 7], [0, 0, 1])),
    ],
)
def test_sequences_end_with_the_token_of_their_score(
    ids: list[int], mask: list[int], pad: int | None, expected: tuple[list[int], list[int]]
) -> None:
    given = example(ids, mask)
    found = up_to_score(given, pad)
    assert (found.input_ids.tolist(), found.token_mask.astype(int).tolist()) == expected
    assert given.token_mask.astype(int).tolist() == mask, "the stored example stays"


def test_batches_have_margins_and_end_at_the_scores() -> None:
    chosen, rejected = example([5, 6, 7, END, 9], [0, 0, 1, 1, 0]), example([5, 6, END, 9], [0, 0, 1, 0])
    pairs = [PreferencePair(chosen, rejected, margin=0.5), PreferencePair(rejected, chosen, margin=2.0)]
    batch = collate_scored_pairs(pairs, 3, scored_pad_token_id=PAD)
    assert batch.lengths.tolist() == [4, 3, 3, 4]
    assert batch.input_ids.tolist()[1] == [5, 6, END, 3]
    assert batch.columns[MARGINS].values.tolist() == [0.5, 0.5, 2.0, 2.0]
    assert batch.group_size == 2
    without = collate_scored_pairs([PreferencePair(chosen, rejected)], 3, scored_pad_token_id=PAD)
    assert MARGINS not in without.columns
