# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokenizers small enough to check masks by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from nemo_rl_moe.data.tokenizer import load_tokenizer
from nemo_rl_moe.errors import DataError
from tests.support.chat_templates import make_byte_tokenizer

REPOSITORY = Path(__file__).parents[3]


def refused(call: Callable[..., object], *arguments: Any, **options: Any) -> list[str]:
    """The lines that a call on data is refused with."""
    with pytest.raises(DataError) as caught:
        call(*arguments, **options)
    return caught.value.problems


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return REPOSITORY


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared tables go to a folder of the test's own."""
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def demo_tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer of the demo: one token a character, `{% generation %}` in its template."""
    return load_tokenizer(str(REPOSITORY / "examples/assets/tiny_qwen3_moe"))


@pytest.fixture(scope="session")
def byte_tokenizer() -> Callable[..., PreTrainedTokenizerBase]:
    """`tests.support.chat_templates.make_byte_tokenizer`."""
    return make_byte_tokenizer


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    """Writes records (or raw lines, as bytes) to a `.jsonl` file and returns its path."""

    def write(*records: object, name: str = "data.jsonl") -> str:
        path = tmp_path / name
        lines = [record if isinstance(record, bytes) else json.dumps(record).encode() for record in records]
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return str(path)

    return write
