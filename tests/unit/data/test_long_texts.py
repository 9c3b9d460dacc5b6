# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts of which few tokens are kept: only so much of them is encoded, and what is kept is the same."""

import numpy as np
import pytest
from tokenizers import normalizers

from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.data import length_limit, sources
from nemo_rl_moe.data.length_limit import LengthLimit
from nemo_rl_moe.data.preferences import load_preferences
from nemo_rl_moe.data.prompts import load_prompts
from nemo_rl_moe.data.records import BadLine, parse_record
from nemo_rl_moe.data.sft import load_sft_dataset
from nemo_rl_moe.errors import DataError
from tests.support.one_example import tokenize_example

CHAT = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
MEGABYTE = 1_000_000


@pytest.fixture
def encoded_characters(monkeypatch):
    """Characters that were given to the tokenizer, call by call."""
    seen = []
    original = length_limit.encode_each

    def counting(encode, items):
        seen.extend(len(item if isinstance(item, str) else item.text) for item in items)
        return original(encode, items)

    monkeypatch.setattr(length_limit, "encode_each", counting)
    return seen


@pytest.mark.parametrize("template", [None, CHAT])
def test_what_is_kept_is_the_same(byte_tokenizer, monkeypatch, encoded_characters, template):
    tokenizer = byte_tokenizer(template, merges=[("a", "b"), ("ab", "c")])
    example = parse_record({"prompt": "abcab" * 3, "completion": "xabc" * 1000}, "f:1")
    kept = tokenize_example(example, tokenizer, 64)
    assert max(encoded_characters) == 65 * len("<|start|>")
    monkeypatch.setattr(LengthLimit, "encode", lambda self, encode, items, cut: length_limit.encode_each(encode, items))
    whole = tokenize_example(example, tokenizer, 64)
    assert np.array_equal(kept.input_ids, whole.input_ids)
    assert np.array_equal(kept.token_mask, whole.token_mask)
    assert (kept.truncated, len(kept)) == (True, 64)


def test_nothing_that_fits_is_cut(byte_tokenizer, encoded_characters):
    """A tokenizer that joins blanks makes one token of more characters than its longest token has."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(" ", "")
    example = parse_record({"prompt": " " * 5000 + "1+1=", "completion": "2"}, "f:1")
    kept = tokenize_example(example, tokenizer, 6)
    assert tokenizer.decode(kept.input_ids) == "1+1=2<|end|>"
    assert not kept.truncated
    assert len(encoded_characters) == 2


def test_of_a_line_of_a_megabyte_a_hundredth_is_encoded(demo_tokenizer, write_jsonl, encoded_characters):
    good = {"prompt": "1+1=", "completion": "2"}
    path = write_jsonl(
        good, {"prompt": "1" * MEGABYTE, "completion": "2"}, {"prompt": "1=", "completion": "2" * MEGABYTE}
    )
    dataset = load_sft_dataset(path, "train", demo_tokenizer, 64)
    assert 64 <= sum(encoded_characters) < MEGABYTE // 100
    assert dataset.report.summary() == (
        f"{path}: 2 examples, 70 tokens (64 to train on), 1 truncated at the maximum length, "
        "1 left out: no response before truncation"
    )


def test_a_long_key_is_not_reported_whole(demo_tokenizer, write_jsonl):
    with pytest.raises(DataError) as error:
        load_sft_dataset(write_jsonl({"k" * MEGABYTE: 1}), "train", demo_tokenizer, 64)
    assert error.value.problems[0].endswith("kkk... (1,000,000 characters)")
    assert len(error.value.problems[0]) < 1500


def test_pairs_and_their_long_responses(demo_tokenizer, write_jsonl, encoded_characters):
    record = {"prompt": "1+1=", "chosen": "2" * MEGABYTE, "rejected": "3"}
    (pair,) = load_preferences(write_jsonl(record), "train", demo_tokenizer, 64)
    assert (len(pair.chosen), pair.chosen.truncated, len(pair.rejected)) == (64, True, 6)
    assert max(encoded_characters) < 1000


def test_a_prompt_that_is_far_too_long_is_left_out_unread(demo_tokenizer, write_jsonl, encoded_characters):
    path = write_jsonl({"prompt": "1" * MEGABYTE, "answer": "2"}, {"prompt": "1+1=", "answer": "2"})
    config = load_grpo_config("grpo_tiny_moe.yaml", [f"data.train.path={path}", "env.name=math"], check_paths=False)
    dataset = load_prompts(config.data.train, config.data, demo_tokenizer, 64, config.env)
    assert [prompt.text for prompt in dataset] == ["1+1="]
    assert max(encoded_characters) < 1000


def test_a_line_that_no_memory_should_hold(demo_tokenizer, write_jsonl, monkeypatch):
    monkeypatch.setattr(sources, "LONGEST_LINE_BYTES", 100)
    good = {"prompt": "1+1=", "completion": "2"}
    path = write_jsonl(good, {"prompt": "1" * 200, "completion": "2"}, good)
    size = len(b'{"prompt": "", "completion": "2"}\n') + 200
    line = f"{path}:2: the line has {size} bytes, expected at most 100"
    with pytest.raises(DataError) as error:
        load_sft_dataset(path, "train", demo_tokenizer, 64)
    assert error.value.problems[0] == line
    report = load_sft_dataset(path, "train", demo_tokenizer, 64, on_bad_line="skip").report
    assert (report.num_kept, report.num_bad_lines, report.bad_lines) == (2, 1, (line,))


@pytest.mark.parametrize("ending", [b"", b"\n"])
def test_the_longest_line(tmp_path, monkeypatch, ending):
    monkeypatch.setattr(sources, "LONGEST_LINE_BYTES", 4)
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"123\n12345678" + ending)
    first, second = sources.read_jsonl(path, lambda record, sample_id: record)
    assert first == 123
    assert isinstance(second, BadLine)
    assert second.reason == f"the line has {8 + len(ending)} bytes, expected at most 4"


def test_a_line_is_read_in_little_memory(tmp_path):
    """60 MB, of which no more than the limit is held at a time."""
    path = tmp_path / "data.jsonl"
    with path.open("wb") as file:
        for _ in range(60):
            file.write(b" " * (1 << 20))
        file.write(b"1\n2\n")
    bad, last = sources.read_jsonl(path, lambda record, sample_id: record)
    assert bad == BadLine(f"{path}:1", "the line has 62,914,562 bytes, expected at most 33,554,432")
    assert last == 2
