# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Properties: the nearest key is found for any slip of the finger, and no input ends in anything but a clear line."""

import subprocess
import sys
import tempfile
from difflib import SequenceMatcher
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_moe.config.loading import load_config
from nemo_rl_moe.config.schema import SFTMasterConfig
from nemo_rl_moe.config.suggestions import nearest, nearest_key
from nemo_rl_moe.config.validation import known_keys
from nemo_rl_moe.errors import ConfigurationError
from tests.support.quick_list import examples
from tests.unit.config.conftest import refused

KEYS = known_keys(SFTMasterConfig)


@settings(deadline=None)
@given(key=st.sampled_from(KEYS), data=st.data())
def test_one_slip_in_the_last_part_suggests_a_key_at_least_as_near(key: str, data: st.DataObject) -> None:
    section, _, name = key.rpartition(".")
    place = data.draw(st.integers(0, len(name) - 1))
    letter = data.draw(st.sampled_from("abcxyz_"))
    slips = [name[:place] + letter + name[place:], name[:place] + letter + name[place + 1 :]]
    if len(name) > 4:  # of two or three letters, one missing is a third of the word
        slips.append(name[:place] + name[place + 1 :])
    slip = data.draw(st.sampled_from(slips))
    wrong = f"{section}.{slip}" if section else slip
    if len(name) < 4 or wrong in KEYS:
        return
    suggestion = nearest_key(wrong, KEYS)
    assert suggestion is not None
    assert suggestion.rpartition(".")[0] == section

    def likeness(candidate: str) -> float:
        return SequenceMatcher(None, candidate.rpartition(".")[2], slip).ratio()

    assert likeness(suggestion) >= likeness(key)


@pytest.mark.full
@settings(deadline=None)
@given(key=st.sampled_from(KEYS))
def test_right_name_in_the_wrong_section_suggests_a_key_of_that_name(key: str) -> None:
    name = key.rpartition(".")[2]
    suggestion = nearest_key(f"nowhere.{name}", KEYS)
    assert suggestion is not None
    assert suggestion.rpartition(".")[2] == name


@settings(deadline=None)
@given(word=st.text(max_size=30), words=st.lists(st.text(max_size=30), max_size=5))
def test_suggestions_are_always_among_the_allowed(word: str, words: list[str]) -> None:
    assert nearest(word, words) in {*words, None}
    assert nearest_key(word, words) in {*words, None}


def test_nothing_alike_suggests_nothing() -> None:
    assert nearest_key("sft.qqqqqq", KEYS) is None
    assert nearest_key("x", []) is None


def lines_about(override: str) -> list[str]:
    try:
        load_config("sft_tiny_moe.yaml", [override], check_paths=False)
    except ConfigurationError as error:
        return error.problems or [""]
    return []


@settings(max_examples=10, deadline=None)
@given(key=st.sampled_from(KEYS), text=st.text(st.characters(codec="utf-8"), max_size=20))
def test_any_value_for_any_key_loads_or_is_reported(key: str, text: str) -> None:
    for override in (f"{key}={text}", f"+{key}={text}", text):
        assert all(lines_about(override))


yaml_like = st.text(st.sampled_from("ab:-[]{},\n '\"$#&*!%@|>~?.0\\"), max_size=40)


@settings(max_examples=examples(100), deadline=None)
@given(text=yaml_like)
def test_any_file_is_reported(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "any.yaml"
        path.write_text(text)
        assert all(refused(load_config, path, check_paths=False))


def test_config_imports_nothing_heavy() -> None:
    code = (
        "import sys, nemo_rl_moe.config.loading, nemo_rl_moe.cli;"
        "print(sorted({'torch', 'ray', 'megatron', 'transformers', 'numpy', 'datasets'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
