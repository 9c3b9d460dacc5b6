# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Loading of the run's tokenizer."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl_moe.errors import ConfigurationError, DataError, one_line
from nemo_rl_moe.models.hf_files import check_small_files
from nemo_rl_moe.models.hub import from_cache_alone, hub_silence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_FAST_FILE = "tokenizer.json"
_FILES = (_FAST_FILE, "tokenizer.model", "tokenizer_config.json", "vocab.*", "tekken.json")


def load_tokenizer(name: str, chat_template: str | None = None) -> "PreTrainedTokenizerBase":
    """Load and return the tokenizer `name`, which makes the same tokens as its `tokenizer.json`.

    transformers rebuilds some tokenizer classes from the vocabulary. If the rebuilt tokenizer makes other tokens than
    the file, the file is read directly.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    is_folder = Path(name).is_dir()
    if is_folder:
        check_small_files(Path(name), "policy.tokenizer.name")
    try:
        with _nothing_printed():
            local = is_folder or from_cache_alone()
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, local_files_only=local)
            if not _makes_tokens_of_file(tokenizer, name):
                tokenizer = PreTrainedTokenizerFast.from_pretrained(name, local_files_only=local)
    except Exception as error:  # the hub, the file formats and tokenizer classes raise dozens of types
        problem = f"cannot be loaded: {one_line(error)}"
        if is_folder and not any(found for pattern in _FILES for found in Path(name).glob(pattern)):
            problem = f"holds no tokenizer; expected a file such as {_FILES[0]}"
        elif not is_folder and (silence := hub_silence()) is not None:
            problem = f"cannot be had from the hub ({silence}), nor from its cache on this machine"
        raise ConfigurationError(f"policy.tokenizer.name: {name}: {problem}") from error
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"policy.tokenizer.chat_template: {chat_template}: {error}") from None
    return tokenizer


_PROBE = "Hello world,  2+2=4\n\tif x: 'n\u00e9' \u4e2d\u6587 "


def _makes_tokens_of_file(tokenizer: "PreTrainedTokenizerBase", name: str) -> bool:
    """Return whether a loaded tokenizer makes the same tokens as its `tokenizer.json`. True if there is no such
    file."""
    from tokenizers import Tokenizer
    from transformers.utils.hub import cached_file

    path = cached_file(name, _FAST_FILE, local_files_only=True, _raise_exceptions_for_missing_entries=False)
    if path is None or not tokenizer.is_fast:
        return True
    published = Tokenizer.from_file(path)
    published.no_truncation()
    published.no_padding()
    try:
        expected = published.encode(_PROBE, add_special_tokens=False).ids
        return list(tokenizer(_PROBE, add_special_tokens=False)["input_ids"]) == expected
    except Exception:  # the vocabulary lacks a character
        return True


@contextmanager
def _nothing_printed() -> Iterator[None]:
    """Discard standard output in this context, because the tokenizers library prints unknown keys of a file."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, "w") as nowhere:  # noqa: PTH123
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def pad_token_id(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the id of the padding token or, if there is none, of the end token. Any token works, because padding is
    masked everywhere."""
    found = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if not isinstance(found, int):
        raise DataError("the tokenizer has neither a padding token nor an end token")
    return found


def vocabulary_problem(ours: "PreTrainedTokenizerBase", theirs: "PreTrainedTokenizerBase") -> str | None:
    """Return a description of the first token of `ours` that has another id in `theirs`, or None if all ids are the
    same."""
    known = theirs.get_vocab()
    for token, token_id in sorted(ours.get_vocab().items(), key=lambda entry: entry[1]):
        other = known.get(token)
        if other != token_id:
            there = "is missing there" if other is None else f"is {other} there"
            return f"token {token_id} ({token!r}) {there}"
    return None
