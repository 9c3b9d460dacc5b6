# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A whole file: what is kept, what is left out, and what is said about it."""

import pytest

from nemo_rl_moe.data.dataset import LINES_AT_ONCE
from nemo_rl_moe.data.sft import load_sft_dataset
from nemo_rl_moe.errors import DataError
from tests.unit.data.conftest import refused


def sums(count):
    return [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(count)]


def test_examples_come_back_in_order(write_jsonl, demo_tokenizer):
    path = write_jsonl(*sums(30))
    dataset = load_sft_dataset(path, "train", demo_tokenizer, 64)
    assert len(dataset) == 30
    assert [demo_tokenizer.decode(item.input_ids) for item in dataset] == [f"{i}+1={i + 1}<eos>" for i in range(30)]
    assert [item.sample_id for item in dataset] == [f"{path}:{line}" for line in range(1, 31)]
    assert demo_tokenizer.decode(dataset[-1].input_ids[dataset[-1].token_mask]) == "30<eos>"
    assert [item.sample_id for item in dataset[28:]] == [f"{path}:29", f"{path}:30"]
    with pytest.raises(IndexError):
        dataset[30]


def test_report_counts_by_hand(write_jsonl, demo_tokenizer):
    path = write_jsonl(
        {"prompt": "1+1=", "completion": "2"},  # 4 + 1 + end
        {"prompt": "1+1=", "completion": "2222"},  # cut to 7: 3 of the completion
        {"prompt": "1+1+1+1=", "completion": "4"},  # the prompt alone is longer than 7
        b"{",
        {"prompt": "1+1=", "completion": "\u00e9"},  # no such token
    )
    report = load_sft_dataset(path, "train", demo_tokenizer, 7, on_bad_line="skip").report
    assert (report.num_kept, report.num_truncated, report.num_dropped, report.num_bad_lines) == (2, 1, 1, 2)
    assert (report.num_tokens, report.num_trained_tokens) == (6 + 7, 2 + 3)
    assert report.bad_lines[0].startswith(f"{path}:4: not valid JSON")
    assert report.bad_lines[1].startswith(f"{path}:5: the tokenizer cannot encode the text")
    assert report.summary() == (
        f"{path}: 2 examples, 13 tokens (5 to train on), 1 truncated at the maximum length (the first: {path}:2),"
        f" 1 left out: no response before truncation (the first: {path}:3),"
        f" 2 bad lines left out, the first: {report.bad_lines[0]}"
    )


def test_summary_of_a_clean_file_is_short(write_jsonl, demo_tokenizer):
    path = write_jsonl(*sums(1))
    assert load_sft_dataset(path, "train", demo_tokenizer, 64).report.summary() == (
        f"{path}: 1 example, 6 tokens (2 to train on)"
    )


def test_stop_lists_every_bad_line(write_jsonl, demo_tokenizer):
    path = write_jsonl({"prompt": "1=", "completion": "Z"}, *sums(2), {"prompt": 1, "completion": "2"})
    assert refused(load_sft_dataset, path, "train", demo_tokenizer, 64) == [
        f"{path}:1: the tokenizer cannot encode the text: WordLevel error: Missing [UNK] token from the vocabulary",
        f"{path}:4: prompt is a number, expected a string or a list of messages",
        f"{path}: data.on_bad_line=skip skips such lines and counts them",
    ]


def test_stop_lists_twenty_and_counts_the_rest(write_jsonl, demo_tokenizer):
    path = write_jsonl(*[{"a" * (1 + kind): 1} for kind in range(22)], *sums(LINES_AT_ONCE), {})
    problems = refused(load_sft_dataset, path, "train", demo_tokenizer, 64)
    assert len(problems) == 22
    assert problems[19].startswith(f"{path}:20: ")
    assert problems[20] == f"{path}: and 3 more bad lines"


def test_one_cause_is_one_problem(write_jsonl, demo_tokenizer):
    """Lines whose reasons differ in numbers alone have one cause; other causes stand beside it."""
    good, no_role = {"role": "user", "content": "1"}, {"content": "2"}
    turns = [{"messages": [good] * number + [no_role]} for number in (1, 2, 3, 4, 5, 6, 7)]
    path = write_jsonl(turns[0], {"prompt": 1, "completion": "2"}, *turns[1:], *sums(2))
    with pytest.raises(DataError) as error:
        load_sft_dataset(path, "train", demo_tokenizer, 64)
    assert error.value.problems == [
        f"{path}:1: messages[1] has no role (and 6 more bad lines like it: 3, 4, 5, 6, 7, ...)",
        f"{path}:2: prompt is a number, expected a string or a list of messages",
        f"{path}: data.on_bad_line=skip skips such lines and counts them",
    ]
    report = load_sft_dataset(path, "train", demo_tokenizer, 64, on_bad_line="skip").report
    assert report.bad_lines == tuple(error.value.problems[:2])
    assert f"8 bad lines left out, the first: {report.bad_lines[0]}" in report.summary()


def test_nothing_left(write_jsonl, demo_tokenizer):
    path = write_jsonl()
    assert refused(load_sft_dataset, path, "train", demo_tokenizer, 64) == [
        f"{path}: no example is left to use",
        f"{path}: it has no lines",
    ]
    path = write_jsonl(*sums(3), {})
    assert refused(load_sft_dataset, path, "train", demo_tokenizer, 4, on_bad_line="skip") == [
        f"{path}: no example is left to use",
        f"{path}:4: the line has neither messages nor prompt and completion; its keys: none; to use other"
        " keys, set data.messages_key, or data.prompt_key and data.completion_key",
        f"{path}: of 3 examples nothing to train on fits into policy.max_total_sequence_length=4 tokens",
    ]


def test_most_of_them_truncated_is_a_warning(write_jsonl, demo_tokenizer):
    path = write_jsonl(*sums(4))
    assert list(load_sft_dataset(path, "train", demo_tokenizer, 64).report.warnings()) == []
    (line,) = load_sft_dataset(path, "train", demo_tokenizer, 5).report.warnings()
    assert line == (
        f"{path}: all 4 examples are truncated at policy.max_total_sequence_length: their further tokens are not"
        " trained on"
    )


def test_missing_file(tmp_path, demo_tokenizer):
    with pytest.raises(DataError, match=r"no\.jsonl: cannot be read: No such file or directory"):
        load_sft_dataset(str(tmp_path / "no.jsonl"), "train", demo_tokenizer, 64)


def test_progress_counts_lines(write_jsonl, demo_tokenizer):
    calls = []
    path = write_jsonl(*sums(LINES_AT_ONCE + 5), {})
    load_sft_dataset(path, "train", demo_tokenizer, 64, "skip", lambda done, total: calls.append((done, total)))
    total = LINES_AT_ONCE + 6
    assert calls == [(LINES_AT_ONCE, total), (total, total)]


def test_a_table_of_sharegpt(demo_tokenizer, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    said = [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}]
    pq.write_table(pa.Table.from_pylist([{"id": "a", "conversations": said, "system": "3"}]), tmp_path / "data.parquet")
    (example,) = load_sft_dataset(str(tmp_path / "data.parquet"), "train", demo_tokenizer, 64)
    assert demo_tokenizer.decode(example.input_ids) == "31+1=2<eos>"
    assert demo_tokenizer.decode(example.input_ids[example.token_mask]) == "2<eos>"
