# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The lines of data that docs/data.md shows, and the limits that it names."""

import json
import re

from nemo_rl_moe.data import image_files
from nemo_rl_moe.data.records import parse_record
from tests.conftest import REPOSITORY_ROOT

TEXT = (REPOSITORY_ROOT / "docs/data.md").read_text(encoding="utf-8")


def test_the_lines_are_records() -> None:
    lines = "".join(re.findall(r"^```json\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)).splitlines()
    records = [parse_record(json.loads(line), "f:1", "images") for line in lines]
    plain, parts, sharegpt, calls, *with_images = records
    assert plain.messages == parts.messages == sharegpt.messages
    assert calls.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 228, "b": 378}
    assert calls.inputs.tools is not None
    assert [len(record.images) for record in with_images] == [1, 1, 1, 1]
    in_parts, _, marked, beside = with_images
    assert in_parts.messages == marked.messages == beside.messages
    assert in_parts.images == marked.images == beside.images


def test_the_limits_are_those_in_force() -> None:
    assert f"up to {image_files.LARGEST_IMAGE_BYTES >> 20} MB" in TEXT
