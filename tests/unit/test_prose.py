# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rates of constructions that make prose hard to read, in docstrings, comments and pages.

The limits are above the rates of TRL, torchtitan, slime and NeMo-RL. A sentence that exceeds one needs another reading,
not another word: write it as you would explain it aloud.
"""

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY_ROOT

LIMITS = {  # per 1,000 words
    r"(?<![\w?])(?:what|whatever) (?:is|are|was|a|an|the|it|they|each|its|has|have|came|comes)\b": 0.9,
    r"\b(?:those|the ones?) (?:that|of|which|who|whose|with|without)\b": 0.2,
    r"(?:(?<=[,.;:(] )|^)[Ww]here (?:a|an|the|it|they|no|none|there|one|this|that|its|each|only|\w+s)\b": 1.0,
    r"\w; [a-z]": 6.0,
    r"None: (?:none|nothing|there is none|no limit|it is)": 0.2,
    r"\bbeside\b": 0.1,
    r"\bbehind\b": 0.4,
    r"\b(?:says|said|say|told|tells)\b": 0.3,
    r"\bstands?\b(?!-in)": 0.2,
    r"\b(?:goes|go|went|gone) on\b": 0.1,
    r"\bleft out\b": 0.2,
    r"\bwhole\b": 0.7,
    r"\b(?:so many|as of|as given|at hand)\b": 0.1,
    r"\b(?:drawn|draws?)\b": 0.1,
    r"\b(?:nobody|somebody|whoever|whom)\b": 0.1,
    r"\bplace[sd]?\b": 0.9,
    r"\bof (?:its|their|your|our) own\b": 0.3,
}


def prose_of_code(path: Path) -> Iterator[str]:
    """Yield the lines of docstrings, of texts below attributes, and of comments."""
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        for each in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            if (
                isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                yield from each.value.value.splitlines()
    with path.open("rb") as file:
        yield from (token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT)


def prose_of_page(path: Path) -> Iterator[str]:
    """Yield the lines outside of code blocks."""
    is_code = False
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield line


def exceeded(lines: Iterator[str]) -> dict[str, float]:
    """Return the rates above their limits, by pattern."""
    plain = [re.sub(r"`[^`]*`", "`", line) for line in lines if "SPDX" not in line and "Copyright" not in line]
    words = sum(len(line.split()) for line in plain)
    rates = {pattern: 1000 * sum(len(re.findall(pattern, line)) for line in plain) / words for pattern in LIMITS}
    return {pattern: round(rate, 2) for pattern, rate in rates.items() if rate > LIMITS[pattern]}


@pytest.mark.parametrize("subject", ["package", "pages"])
def test_prose_keeps_within_the_limits(subject: str) -> None:
    if subject == "package":
        lines = (line for path in (REPOSITORY_ROOT / "nemo_rl_moe").rglob("*.py") for line in prose_of_code(path))
    else:
        pages = [REPOSITORY_ROOT / "README.md", *(REPOSITORY_ROOT / "docs").rglob("*.md")]
        lines = (line for path in pages for line in prose_of_page(path))
    assert exceeded(lines) == {}


def test_a_construction_above_its_limit_is_found() -> None:
    assert exceeded(iter(["It says what a run has beside its own, `where it says`."] * 2)).keys() >= {r"\bbeside\b"}


def test_pages_keep_within_their_word_budget() -> None:
    """A page that needs more words is two pages, or repeats another one."""
    pages = [REPOSITORY_ROOT / "README.md", *(REPOSITORY_ROOT / "docs").glob("*.md")]
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in pages}
    generated = {"published-templates.md"}
    assert {name: count for name, count in words.items() if count > 2500 and name not in generated} == {}
    assert words["README.md"] <= 500
    # Tables and code are reference, which nobody reads from beginning to end.
    prose = [line for page in pages for line in prose_of_page(page) if not line.lstrip().startswith("|")]
    assert sum(len(line.split()) for line in prose) <= 30_000
    assert sum(count for name, count in words.items() if name not in generated) <= 64_000


def test_the_index_of_the_tests_support_names_every_module_once() -> None:
    support = REPOSITORY_ROOT / "tests/support"
    named = re.findall(r"^- `(.+?)`: ", (support / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(named) == sorted(path.relative_to(support).as_posix() for path in support.rglob("*.py"))
