# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Pairs of responses: what a line may look like, what the model sees of it, and what is left out."""

import datasets
import numpy as np
import pytest
import torch

from nemo_rl_moe.data.loader import GlobalBatchLoader, sequential_batches
from nemo_rl_moe.data.preferences import REFERENCE_SUMS, collate_pairs, load_preferences, parse_preference
from nemo_rl_moe.data.records import RecordError
from nemo_rl_moe.errors import DataError
from tests.unit.data.conftest import refused

USER = {"role": "user", "content": "2+2="}
RIGHT, WRONG = ({"role": "assistant", "content": text} for text in ("4", "5"))
NAMED = "to use other keys, set data.chosen_key and data.rejected_key"
FORMS = {
    "texts": {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
    "messages": {"prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG]},
    "a text and messages": {"prompt": "2+2=", "chosen": [RIGHT], "rejected": "5"},
    "whole conversations": {"chosen": [USER, RIGHT], "rejected": [USER, WRONG], "prompt": None},
    "conversations that repeat the prompt": {
        "prompt": "2+2=",
        "chosen": [USER, RIGHT],
        "rejected": [USER, WRONG],
        "score": 1,
    },
}


@pytest.mark.parametrize("record", FORMS.values(), ids=FORMS.keys())
def test_every_form_says_the_same(record, write_jsonl, demo_tokenizer):
    path = write_jsonl(record)
    (pair,) = load_preferences(path, "train", demo_tokenizer, 64)
    for example, answer, name in ((pair.chosen, "4", "chosen"), (pair.rejected, "5", "rejected")):
        assert demo_tokenizer.decode(example.input_ids) == f"2+2={answer}<eos>"
        assert demo_tokenizer.decode(example.input_ids[example.token_mask]) == f"{answer}<eos>"
        assert example.sample_id == f"{path}:1 ({name})"
    assert pair.reference_sums is None


def test_conversations_of_several_turns():
    again = {"role": "user", "content": "sure?"}
    record = parse_preference({"chosen": [USER, RIGHT, again, RIGHT], "rejected": [USER, RIGHT, again, WRONG]}, "here")
    assert record.chosen.first_trained_message == record.rejected.first_trained_message == 3
    # The last turn is the response even where one conversation begins as the other does.
    shorter = parse_preference({"chosen": [USER, RIGHT, again, RIGHT], "rejected": [USER, RIGHT]}, "here")
    assert shorter.rejected.first_trained_message == 1


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([1], "the line is a list, expected an object with prompt, chosen and rejected"),
        (
            {"prompt": "a", "completion": "b"},
            f"the line has no chosen and no rejected; its keys: prompt, completion; {NAMED}",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": None},
            f"the line has no rejected; its keys: prompt, chosen, rejected; {NAMED}",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "b"},
            "chosen and rejected are the same: there is nothing to prefer",
        ),
        (
            {"prompt": [USER], "chosen": [USER, RIGHT], "rejected": [USER, RIGHT]},
            "chosen and rejected are the same: .*",
        ),
        ({"chosen": [RIGHT], "rejected": [WRONG]}, "the line has no prompt, and chosen and rejected do not begin .*"),
        ({"chosen": "4", "rejected": "5"}, "the line has no prompt, and chosen and rejected do not begin .*"),
        ({"prompt": "a", "chosen": [USER], "rejected": "b"}, "chosen has no assistant turn: there is no response"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "rejected is empty"),
        ({"prompt": 1, "chosen": "b", "rejected": "c"}, "prompt is a number, expected a string or a list of messages"),
        ({"prompt": "a", "chosen": 2, "rejected": "c"}, "chosen is a number, expected a string or a list of messages"),
    ],
)
def test_bad_lines(record, reason):
    with pytest.raises(RecordError, match=f"^{reason}$"):
        parse_preference(record, "here")


def test_report_counts_by_hand(write_jsonl, demo_tokenizer):
    path = write_jsonl(
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},  # 4 + 1 + end, twice
        {"prompt": "1+1=", "chosen": "2", "rejected": "3333"},  # the second is cut to 7: 3 of the response
        {"prompt": "1+1+1+1=", "chosen": "4", "rejected": "5"},  # the prompt alone is longer than 7
        {"prompt": "1+1=", "chosen": "2220", "rejected": "2221"},  # they differ after the cut
        b"{",
        {"prompt": "1+1=", "chosen": "2", "rejected": "2"},
        {"prompt": "1+1=", "chosen": "2", "rejected": "é"},  # no such token
    )
    report = load_preferences(path, "train", demo_tokenizer, 7, on_bad_line="skip").report
    assert (report.num_kept, report.num_truncated, report.num_dropped, report.num_bad_lines) == (2, 1, 2, 3)
    assert (report.num_tokens, report.num_trained_tokens) == (6 + 6 + 6 + 7, 2 + 2 + 2 + 3)
    assert report.bad_lines[2].startswith(f"{path}:7 (rejected): the tokenizer cannot encode the text")
    assert report.summary() == (
        f"{path}: 2 pairs, 25 tokens (9 of responses), 1 truncated at the maximum length (the first: {path}:2),"
        f" 2 left out: no two different responses before truncation (the first: {path}:3),"
        f" 3 bad lines left out, the first: {report.bad_lines[0]}"
    )


def test_stop_lists_bad_lines_and_nothing_left_says_why(write_jsonl, demo_tokenizer):
    path = write_jsonl(
        {"prompt": "1=", "chosen": "1", "rejected": "2"}, {}, {"prompt": "1=", "chosen": "Z", "rejected": "1"}
    )
    with pytest.raises(DataError) as error:
        load_preferences(path, "train", demo_tokenizer, 64)
    assert error.value.problems[0] == f"{path}:2: the line has no chosen and no rejected; its keys: none; {NAMED}"
    assert error.value.problems[1].startswith(f"{path}:3 (chosen): the tokenizer cannot encode the text")
    assert refused(load_preferences, path, "train", demo_tokenizer, 2, on_bad_line="skip")[-1] == (
        f"{path}: of 1 pair no two different responses fit into policy.max_total_sequence_length=2 tokens"
    )


def test_a_table_of_conversations(tmp_path, demo_tokenizer):
    rows = [{"chosen": [USER, RIGHT], "rejected": [USER, WRONG], "score_chosen": 1.0}] * 3
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "train.parquet")
    dataset = load_preferences(str(tmp_path), "train", demo_tokenizer, 64)
    assert [demo_tokenizer.decode(pair.rejected.input_ids) for pair in dataset] == ["2+2=5<eos>"] * 3
    datasets.Dataset.from_list([{"prompt": "a", "completion": "b"}]).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(DataError, match="has no chosen and rejected; its columns: prompt, completion"):
        load_preferences(str(tmp_path), "train", demo_tokenizer, 64)


def test_batches_hold_pairs_as_neighbours(write_jsonl, demo_tokenizer):
    records = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "0" * (i + 1)} for i in range(5)]
    dataset = load_preferences(write_jsonl(*records), "train", demo_tokenizer, 64)
    loader = GlobalBatchLoader(dataset, 2, 99, seed=3, make_batch=collate_pairs)
    (first, _), (chosen, _) = loader.epoch(0), loader.indices(range(2))
    assert first.group_size == 2
    assert not first.columns
    texts = [demo_tokenizer.decode(row[:length]) for row, length in zip(first.input_ids, first.lengths, strict=True)]
    assert texts == [f"{i}+1={answer}<eos>" for i in chosen for answer in (i + 1, "0" * (i + 1))]
    assert first.token_mask.sum(dim=1).tolist() == [size for i in chosen for size in (len(str(i + 1)) + 1, i + 2)]

    sums = np.arange(10.0).reshape(5, 2)
    measured = list(sequential_batches(dataset.with_reference_sums(sums), 3, 99, make_batch=collate_pairs))
    assert [len(batch) for batch in measured] == [6, 4]
    torch.testing.assert_close(
        measured[1].columns[REFERENCE_SUMS].values, torch.tensor([6.0, 7, 8, 9], dtype=torch.float64)
    )
    assert measured[0].select([2, 3]).columns[REFERENCE_SUMS].values.tolist() == [2, 3]
