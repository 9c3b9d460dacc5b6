# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Arguments of TRL and keys of verl with their counterparts here, from `other_frameworks.yaml`."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import yaml
from pydantic import TypeAdapter


@cache
def counterparts() -> dict[str, list[dict[str, str]]]:
    """Framework -> its tables. Each table maps the framework's names to full keys here."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return TypeAdapter(dict[str, list[dict[str, str]]]).validate_python(yaml.safe_load(text))


def counterpart_elsewhere(key: str, known: Sequence[str]) -> str | None:
    """Return the end of an error line that gives the key here for an unknown key of TRL or verl. None for other keys.

    An argument of TRL is recognised in any section, a key of verl only by its full name.
    """
    for framework, tables in counterparts().items():
        name = key.rpartition(".")[2] if framework == "TRL" else key
        ours = next((table[name] for table in tables if table.get(name) in known), None)
        if ours is not None:
            return f"; {framework}'s {name} is {ours} here"
    return None
