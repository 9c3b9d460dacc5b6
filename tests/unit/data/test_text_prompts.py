# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts of a plain text file, one a line, and prompts that nothing scores."""

from pathlib import Path

import pytest

from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.data.prompts import PromptDataset, load_prompts
from tests.support.chat_templates import make_byte_tokenizer
from tests.unit.data.conftest import refused


def load(path: Path, *overrides: str) -> PromptDataset:
    chosen = ["policy.model_name=x", f"data.train.path={path}", *overrides]
    config = load_grpo_config("grpo_generate.yaml", chosen, check_paths=False)
    return load_prompts(config.data.train, config.data, make_byte_tokenizer(), 64, None)


def test_each_line_is_a_prompt_and_repeats_stay(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes('\ufeff7+8=\r\n"quoted" {not: json}\n7+8=\n  ä\u2028b'.encode())
    found = load(path)
    assert [prompt.text for prompt in found] == ["7+8=", '"quoted" {not: json}', "7+8=", "  ä\u2028b"]
    assert [prompt.sample_id for prompt in found] == [f"{path}:{line}" for line in (1, 2, 3, 4)]
    assert found.report.num_repeated == 0


def test_the_key_of_prompts_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("1+1=\n")
    assert [prompt.text for prompt in load(path, "data.prompt_key=a.b")] == ["1+1="]


@pytest.mark.parametrize(("content", "problem"), [(b"a\n\nb\n", "prompts.txt:2: "), (b"a\n\xff\n", "not valid UTF-8")])
def test_a_line_that_cannot_be_used_is_named(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(content)
    assert problem in refused(load, path)[0]


def test_records_need_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "7+8="}\n{"prompt": "7+8=", "answer": 15}\n')
    assert len(load(path)) == 2
