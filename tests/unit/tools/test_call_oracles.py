# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls as the formats read them beside the recorded readings of vLLM and SGLang (`tests/record_call_oracles.py`)."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from nemo_rl_moe.tools.formats.interface import ToolCall
from nemo_rl_moe.tools.formats.registry import TOOL_FORMATS
from nemo_rl_moe.tools.formats.typed_values import properties_of
from tests.support.call_cases import CASES, PARAMETERS
from tests.unit.test_docs_examples import DOCS

TESTS = DOCS.parent / "tests"
RECORDED: dict[str, Any] = json.loads((TESTS / "call_oracles.json").read_text("utf-8"))
DIFFERENCES: dict[str, dict[str, list[str]]] = json.loads((TESTS / "call_differences.json").read_text("utf-8"))
NAMED = {(name, case) for cases_of in DIFFERENCES.values() for name, cases in cases_of.items() for case in cases}
PAGE = (DOCS / "tool-formats.md").read_text("utf-8")
ORACLES = ("vllm", "sglang")


def read(name: str, text: str) -> list[Any]:
    """Return the calls, `None` for a malformed one."""
    schemas = {tool: properties_of(parameters) for tool, parameters in PARAMETERS.items()}
    calls = TOOL_FORMATS[name].calls(text, schemas)
    return [[call.name, dict(call.arguments)] if isinstance(call, ToolCall) else None for call in calls]


def is_alike(ours: list[Any], theirs: list[Any] | str) -> bool:
    """Return whether two readings are the same; a malformed call is what is no call there, or an error."""
    if ours and not any(ours):
        return not theirs or isinstance(theirs, str)
    return json.dumps(ours, sort_keys=True) == json.dumps(theirs, sort_keys=True)


def different() -> Iterator[tuple[str, str]]:
    for case in RECORDED["cases"]:
        ours = read(case["format"], case["text"])
        if not all(is_alike(ours, case[oracle]) for oracle in ORACLES if oracle in case):
            yield case["format"], case["case"]


def test_all_cases_are_recorded() -> None:
    recorded = {(case["format"], case["case"]): case["text"] for case in RECORDED["cases"]}
    assert recorded == {(name, case): text for name, cases in CASES.items() for case, text in cases.items()}
    assert set(CASES) == set(TOOL_FORMATS) - {"function_calls"}  # which neither of them reads


def test_each_difference_from_vllm_and_sglang_is_named_and_no_other() -> None:
    assert set(different()) == NAMED


def test_the_page_has_all_differences() -> None:
    table = PAGE.partition("| difference |")[2]
    assert re.findall(r"^\| ([^|]+?) \|", table, re.MULTILINE) == list(DIFFERENCES)
    versions = RECORDED["versions"]
    words = " ".join(PAGE.split())
    assert f"{len(RECORDED['cases'])} texts" in words
    assert f"vLLM {versions['vllm']}" in words
    assert f"SGLang {versions['sglang']}" in words


def test_the_page_has_all_formats() -> None:
    table = PAGE.partition("| format |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ([^|]+?) \|", table, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(.+?)`", row)}
    assert named == {*TOOL_FORMATS, "vllm:NAME", "my_module:FORMAT"}


@pytest.mark.parametrize("name", ["harmony", "olmo3"])
def test_the_most_exact_formats_read_all_cases_as_vllm(name: str) -> None:
    assert name not in {each for each, _ in NAMED}
