# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The lines of data that docs/data.md shows, and the limits that it names."""

import json
import re

from nemo_rl_moe.data import sources, template_process
from nemo_rl_moe.data.records import parse_record
from tests.conftest import REPOSITORY_ROOT

TEXT = (REPOSITORY_ROOT / "docs/data.md").read_text(encoding="utf-8")


def test_the_lines_are_records() -> None:
    lines = "".join(re.findall(r"^```json\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)).splitlines()
    plain, parts, sharegpt, calls = (parse_record(json.loads(line), "f:1") for line in lines)
    assert plain.messages == parts.messages == sharegpt.messages
    assert calls.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 228, "b": 378}
    assert calls.inputs.tools is not None


def test_the_limits_are_those_in_force() -> None:
    limits = f"{template_process.CPU_LIMIT_S} s of computing and {template_process.MEMORY_LIMIT >> 20} MB"
    assert limits in " ".join(TEXT.split())
    assert f"may have {sources.LONGEST_LINE_BYTES >> 20} MB" in TEXT
