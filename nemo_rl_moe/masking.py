# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Masks secrets: values of keys such as `HF_TOKEN` or `password`, and passwords in URLs.

Values of keys that only look like secrets stay readable: `max_num_tokens`, `eos_token`, `tokenizer`, `image_key`,
`output_key`.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

MASK = "***"
"""Text that replaces a secret."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_ALWAYS = re.compile(r"apikeys?|authorization|bearer|cookies?|credentials?|jwt|passphrase|passwd|passwords?|secrets?")
_BEFORE_KEY = re.compile(
    r"access|account|api|app|application|auth|client|deploy|encryption|license|master|private|secret|service|signing"
    r"|ssh|storage|subscription"
)
_BEFORE_TOKENS = re.compile(r"access|api|auth|bearer|github|hf|hub|id|refresh|session|user|wandb")
_OF_A_TEXT = re.compile(
    r"a|added|and|begin|bos|cls|decoder|each|end|eos|extra|first|generated|image|last|mask|max|min|next|num|pad|per"
    r"|prompt|response|sep|special|start|stop|think|tool|unk|video|vision"
)
"""Words that show, before `token` in a key, that the token is a piece of a text and no secret."""
_PLACE = re.compile(r"dir|env|files?|folder|path")
# Limited lengths and fixed beginnings of words keep the time linear in the length of any text. The second slash is
# optional, since a URL that was converted to a path has one slash.
_USER_AND_PASSWORD = re.compile(
    r"(?P<before>(?<![\w+.-])[A-Za-z][\w+.-]{0,30}://?[^\s/@:?#'\"]{0,300})"
    r":(?:[^\s/?#'\"]{0,300}|(?!\d{1,5}[/?#])[^\s'\"]{0,300})@"
)
_TOKEN_AS_USER = re.compile(r"(?P<before>https?://?)[^\s/@:?#'\"]{1,300}@")
_IN_A_QUERY = re.compile(r"(?P<before>[?&](?P<key>[\w.-]+)=)[^\s&#'\"]+")
_ASSIGNED = re.compile(
    r"(?P<before>(?<![\w-])(?P<key>[\w-]+)[\"']?\s*[=:]\s*)(?:\"[^\"]*\"?|'[^']*'?|[^\s,{}\[\]][^,}\]]*)"
)
_OPENED = re.compile(r"(?<![\w-])(?P<key>[\w-]+)[\"']?\s*[=:]\s*[\[{]")


def is_secret(key: str) -> bool:
    """Return whether a dotted key (by its last part) or the name of an environment variable names a secret."""
    name = key.rpartition(".")[2]
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or _PLACE.fullmatch(words[-1]):
        return False  # the key of a path or variable name, such as `token_file`
    before, last = words[-2] if len(words) > 1 else "", words[-1]
    pairs = list(pairwise(words))
    if any(map(_ALWAYS.fullmatch, words)) or ("connection", "string") in pairs:
        return True
    if any(second in ("key", "keys") and _BEFORE_KEY.fullmatch(first) for first, second in pairs):
        return True
    is_variable = name.isupper()
    if last in ("key", "pass", "pwd"):
        # `PWD` is the working folder.
        return (is_variable and name != "PWD") or (last == "pwd" and bool(before))
    if last == "tokens":
        return _BEFORE_TOKENS.fullmatch(before) is not None
    return last == "auth" or (last == "token" and not _OF_A_TEXT.fullmatch(before))


def masked(value: Any, key: str = "") -> Any:
    """Return a copy of nested mappings and lists in which secrets are masked.

    Args:
        key: Key of the value. If it names a secret, everything in the value is masked.
    """
    hides = is_secret(key)
    if isinstance(value, Mapping):
        return {name: masked(entry, key if hides else str(name)) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [masked(entry, key) for entry in value]
    if not hides:
        return masked_text(value) if isinstance(value, str) else value
    is_empty = value is None or value == "" or isinstance(value, bool)
    # A number under a key with "token" may be a token id. Other numbers, such as a password of digits, are masked.
    is_number = isinstance(value, int | float) and "token" in key.lower() and not key.isupper()
    return value if is_empty or is_number else MASK


def masked_text(text: str) -> str:
    """Return a text in which passwords in URLs are masked, such as `https://user:***@host`."""
    if ":/" not in text:
        return text
    text = _TOKEN_AS_USER.sub(rf"\g<before>{MASK}@", _USER_AND_PASSWORD.sub(rf"\g<before>:{MASK}@", text))
    return _IN_A_QUERY.sub(_hide_if_secret, text)


def masked_assignment(text: str) -> str:
    """Return an override such as `section.HF_TOKEN=value` with secrets masked. The override may be malformed."""
    key, sign, value = text.partition("=")
    if sign and any(map(is_secret, key.strip().split("."))):
        return f"{key}{sign}{MASK}"
    if any(is_secret(found["key"]) for found in _OPENED.finditer(value)):
        return f"{key}{sign}{MASK}"  # all of the value, since finding a nested secret would need a parser
    return masked_text(_ASSIGNED.sub(_hide_if_secret, text))


def masks_in(value: Any, key: str = "") -> Iterator[str]:
    """Yield the dotted keys of values in which the mask `***` has replaced a secret."""
    entries = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, entry in entries:
        yield from masks_in(entry, f"{key}.{name}" if key else str(name))
    if isinstance(value, str) and ((value == MASK and any(map(is_secret, key.split(".")))) or _has_masks(value)):
        yield key


def _has_masks(text: str) -> bool:
    """Return whether `masked_text` has masked something in a text."""
    queries = _IN_A_QUERY.finditer(text)
    return f"{MASK}@" in text or any(is_secret(each["key"]) and each[0].endswith(f"={MASK}") for each in queries)


def _hide_if_secret(found: re.Match[str]) -> str:
    return f"{found['before']}{MASK}" if is_secret(found["key"]) else found[0]
