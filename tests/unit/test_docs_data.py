# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The lines of data that docs/data.md shows, and the limits that it names."""

import json
import re
from collections.abc import Iterator
from typing import Any

from nemo_rl_moe.data import image_files
from nemo_rl_moe.data.records import parse_record
from tests.conftest import REPOSITORY_ROOT

TEXT = (REPOSITORY_ROOT / "docs/data.md").read_text(encoding="utf-8")


def json_values(text: str) -> Iterator[dict[str, Any]]:
    """The JSON values of a text, each on one line or several."""
    while text := text.lstrip():
        value, end = json.JSONDecoder().raw_decode(text)
        yield value
        text = text[end:]


def test_the_lines_are_records() -> None:
    text = "".join(re.findall(r"^```json\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))
    records = [parse_record(value, "f:1", "images") for value in json_values(text)]
    plain, sharegpt, calls, *with_images = records
    assert plain.messages == sharegpt.messages
    assert calls.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 228, "b": 378}
    assert calls.inputs.tools is not None
    assert [len(record.images) for record in with_images] == [1, 1, 1]
    in_parts, marked, beside = with_images
    assert in_parts.messages == marked.messages == beside.messages
    assert in_parts.images == marked.images == beside.images


def test_the_limits_are_those_in_force() -> None:
    assert f"up to {image_files.LARGEST_IMAGE_BYTES >> 20} MB" in TEXT
