# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The pages for users of other frameworks name keys that exist, and all of the translator's table."""

import re
from pathlib import Path

import pytest

from nemo_rl_moe.config.algorithm import ALGORITHMS
from nemo_rl_moe.config.nemo_rl_data import DATASETS
from nemo_rl_moe.config.nemo_rl_keys import ROWS
from nemo_rl_moe.config.other_frameworks import counterparts
from nemo_rl_moe.config.validation import known_keys
from nemo_rl_moe.rl.corrections import CORRECTIONS
from nemo_rl_moe.rl.estimators import ESTIMATORS
from nemo_rl_moe.rl.objectives import OBJECTIVES
from tests.conftest import REPOSITORY_ROOT
from tests.unit.test_docs_site import script

PAGE = REPOSITORY_ROOT / "docs" / "migrating.md"
FROM_TRL = PAGE.with_name("from-trl.md")
KNOWN = {key for algorithm in ("sft", "dpo", "rm", "grpo") for key in known_keys(ALGORITHMS[algorithm].config_class)}
NAMES = {key.rpartition(".")[2] for key in KNOWN}
SECTIONS = {key.partition(".")[0] for key in KNOWN}


def columns(page: Path, heading: str, number: int) -> list[str]:
    """Cells of one column of the tables under a heading of a page, without their heads."""
    part = page.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in part.splitlines() if line.startswith("| ")]
    return [row[number].strip() for row in rows[1:]]


@pytest.mark.parametrize(("page", "heading"), [(FROM_TRL, "Arguments"), (PAGE, "From verl")])
def test_keys_of_ours_are_there(page: Path, heading: str) -> None:
    cells = columns(page, heading, 1)
    assert len(cells) > 15
    for cell in cells:
        for key in re.findall(r"`([\w.*]+)`", cell):
            name = key.rpartition(".")[2]
            if key.partition(".")[0] in SECTIONS and "*" not in key:
                assert key in KNOWN, key
            elif "*" not in key:
                assert name in NAMES, key


@pytest.mark.parametrize(
    ("framework", "page", "heading"), [("TRL", FROM_TRL, "Arguments"), ("verl", PAGE, "From verl")]
)
def test_the_counterparts_in_errors_are_those_of_the_page(framework: str, page: Path, heading: str) -> None:
    """In rows with as many names there as here; the page omits sections that the row has already named."""
    tables, compared = counterparts()[framework], 0
    cells = zip(columns(page, heading, 0), columns(page, heading, 1), strict=True)
    rows = [row for row in cells if not row[1].startswith("the same")]
    for theirs, ours in ([re.findall(r"`([^`]+)`", cell) for cell in row] for row in rows):
        if len(theirs) != len(ours):
            continue
        for name, key in zip(theirs, ours, strict=True):
            found = [table[name] for table in tables if name in table]
            assert not found or any(each == key or each.endswith(f".{key}") for each in found), name
            compared += bool(found)
    assert compared > 12


def test_losses_are_named_by_keys_and_values_that_are_there() -> None:
    values = {*ESTIMATORS, *OBJECTIVES, *CORRECTIONS, "sequence", "divergence", "batch"}
    cells = columns(PAGE, "Losses and estimators, by every name", 2)
    named = {word for cell in cells for text in re.findall(r"`([^`]+)`", cell) for word in text.split(": ")}
    assert named >= {*ESTIMATORS, *OBJECTIVES, *CORRECTIONS} - {"clipped", "none"}
    for cell in cells:
        for text in re.findall(r"`([^`]+)`", cell):
            key, _, value = text.partition(": ")
            assert (key in KNOWN) or (key.rpartition(".")[2] in NAMES) or key in values, text
            assert not value or value in values | {"true", "false", "L"}, text


def test_the_table_of_the_site_has_every_row() -> None:
    table = script("make_migration_table").reference()
    before, mark, _ = PAGE.read_text().partition("<!-- every key of NeMo-RL -->")
    assert mark
    assert "`python docs/make_migration_table.py`" in before.splitlines()[-2], "a clone shows no tables"
    assert [row.theirs for row in ROWS if f"| `{row.theirs}` |" not in table] == []
    assert [name for name in DATASETS if f"| `{name}` |" not in table] == []
    (head, *_) = table.splitlines()
    assert head == "### Keys with a counterpart"
