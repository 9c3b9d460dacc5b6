# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Traps in a YAML text, found before it is parsed: numbers that mean something else, and oversized documents.

YAML 1.1 has numbers to the base of 60 (`1:30` is 90) and of 8 (`017` is 15), which nobody means here.
"""

import re
from collections.abc import Iterator
from contextlib import suppress

import yaml
from yaml import ScalarToken, YAMLError

from nemo_rl_moe.config.suggestions import shortened

DEEPEST_NESTING = 50
LONGEST_NUMBER = 400
"""Digits of the longest number; a float of 64 bits has 309 at most."""
_BASE_60 = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
_BASE_8 = re.compile(r"[-+]?0[0-7_]+")
_DIGITS = re.compile(r"[-+]?[0-9_.]+")
_OPENING = (
    yaml.BlockMappingStartToken,
    yaml.BlockSequenceStartToken,
    yaml.FlowMappingStartToken,
    yaml.FlowSequenceStartToken,
)
_CLOSING = (yaml.BlockEndToken, yaml.FlowMappingEndToken, yaml.FlowSequenceEndToken)


def traps(text: str) -> list[tuple[int, str]]:
    """Find the traps of a text: the line of each, counted from 1, and what is wrong. The last one may end
    the search.

    An invalid text is left to the parser from where it is invalid.
    """
    found: list[tuple[int, str]] = []
    with suppress(YAMLError):
        found.extend(_traps(text))
    return found


def _traps(text: str) -> Iterator[tuple[int, str]]:
    depth = 0
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        line = token.start_mark.line + 1
        depth += isinstance(token, _OPENING) - isinstance(token, _CLOSING)
        if depth > DEEPEST_NESTING:
            yield line, f"nested more than {DEEPEST_NESTING} levels deep"
            return
        if isinstance(token, ScalarToken) and token.plain:
            problem = _number_problem(token.value)
            if problem is not None:
                yield line, problem


def _number_problem(word: str) -> str | None:
    if len(word) > LONGEST_NUMBER and _DIGITS.fullmatch(word):
        return f"{shortened(word)} is a number of more than {LONGEST_NUMBER} digits"
    if not (_BASE_60.fullmatch(word) or _BASE_8.fullmatch(word)):
        return None
    read = yaml.safe_load(word)
    if isinstance(read, str) or (":" not in word and read == int(word.replace("_", ""))):
        return None  # no number to YAML either, or one that is the same to the base of 10
    base = 60 if ":" in word else 8
    return f"YAML reads {word} as {read}, a number to the base of {base}; put a text in quotes, or write {read}"
