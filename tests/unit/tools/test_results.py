# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Results of tools as texts, and what a tool's process forgets."""

import os
import subprocess
import sys
from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_moe.distributed.process_limits import forget_secrets
from nemo_rl_moe.tools.results import as_text, cut


def test_texts_stay_and_the_rest_is_json() -> None:
    assert as_text("a\nb") == "a\nb"
    assert as_text({"é": [1, None, True]}) == '{"é": [1, null, true]}'
    assert as_text(3.5) == "3.5"
    assert as_text({1}) == '"{1}"'
    assert as_text("\ud800") == "?"


def test_what_json_cannot_write_is_an_error() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    for value, problem in (
        (object(), "there is a value of type object"),
        ([iter(())], "there is a value of type tuple_iterator"),
        ({(1, 2): 3}, "keys must be str"),
        (cycle, "Circular reference"),
        (10**5000, "Exceeds the limit"),
    ):
        with pytest.raises(TypeError, match=f"is neither a text nor a JSON value: {problem}"):
            as_text(value)
    assert as_text(date(2026, 11, 27)) == '"2026-11-27"'


@given(st.text(), st.integers(1, 20))
def test_a_cut_text_says_so(text: str, most: int) -> None:
    shown, is_cut = cut(text, most)
    assert is_cut == (len(text) > most)
    assert shown == text if not is_cut else shown.startswith(text[:most]) and f"{len(text)} characters]" in shown


def test_secrets_are_forgotten_and_the_rest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "DB_PASSWORD", "HARMLESS", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "x")
    before = set(os.environ)
    kept = dict(os.environ)
    try:
        forget_secrets()
        left = set(os.environ)
    finally:
        os.environ.update(kept)
    assert {"HF_TOKEN", "WANDB_API_KEY", "DB_PASSWORD"} <= before - left
    assert {"HARMLESS", "TOKENIZERS_PARALLELISM", "PATH"} <= left


_FORGETS = """
import subprocess
from pathlib import Path
from nemo_rl_moe.tools.worker import forget_secrets
forget_secrets()
print(Path("/proc/self/environ").read_bytes(), subprocess.check_output(["env"]))
"""


def test_secrets_are_gone_from_what_the_process_was_started_with() -> None:
    environment = {**os.environ, "MY_API_KEY": "hunter2", "HARMLESS": "kept", "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(
        [sys.executable, "-c", _FORGETS], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert "hunter2" not in found
    assert found.count("HARMLESS=kept") == 2
