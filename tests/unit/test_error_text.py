# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Errors with text from data, configurations and templates, as they reach the terminal of the real command."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl_moe.errors import UserError, escape_log_messages, printable, report_error

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = REPOSITORY / "examples/assets/tiny_qwen3_moe"
HOSTILE = "\x1b]0;PWNED\x07\x1b[2J\r\u202e"
GOOD = json.dumps({"prompt": "1+1=", "completion": "2"})


def reported(folder: Path, *overrides: str, training_line: str = GOOD) -> str:
    """Standard error of `nemo-rl-moe sft`, which ends with exit code 2."""
    (folder / "train.jsonl").write_text(f"{training_line}\n")
    command = [
        *(sys.executable, "-m", "nemo_rl_moe.cli", "sft", "--config", "sft_tiny_moe.yaml"),
        *(f"policy.model_name={MODEL}", "data.train.path=train.jsonl", "data.validation.path=train.jsonl"),
        *overrides,
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 2, ended.stderr
    return ended.stderr


def assert_escaped(text: str) -> None:
    assert [c for c in text if c != "\n" and not c.isprintable()] == []
    assert r"\x1b]0;PWNED\x07\x1b[2J\r\u202e" in text


@pytest.mark.slow
def test_a_key_of_a_data_line(tmp_path: Path) -> None:
    assert_escaped(reported(tmp_path, training_line=json.dumps({HOSTILE: 1})))


def test_an_unknown_key_of_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"defaults: sft_tiny_moe.yaml\n{json.dumps(HOSTILE)}: 1\n")
    text = reported(tmp_path, "--config", "run.yaml")
    assert_escaped(text)
    assert "unknown key" in text


@pytest.mark.slow
def test_what_a_chat_template_raises(tmp_path: Path) -> None:
    (tmp_path / "hostile.jinja").write_text("{{ raise_exception(messages[0].content) }}")
    line = json.dumps({"prompt": HOSTILE, "completion": "2"})
    text = reported(tmp_path, "policy.tokenizer.chat_template=hostile.jinja", training_line=line)
    assert_escaped(text)
    assert "train.jsonl:1: the chat template refuses the conversation" in text


@pytest.mark.parametrize("kept", ["\n\t", ""])
def test_what_is_printable_stays(kept: str) -> None:
    assert printable("caf\u00e9 \U0001f600 [bold]", kept) == "caf\u00e9 \U0001f600 [bold]"
    assert printable("a\nb", kept) == ("a\nb" if kept else r"a\nb")


def test_a_line_of_an_error_that_is_far_too_long_is_cut_in_its_middle(capsys: pytest.CaptureFixture[str]) -> None:
    report_error("first\nkey " + "x" * 50_000 + ": expected a number")
    text = capsys.readouterr().err
    assert text.startswith("error: first\nkey xxx")
    assert " [... 50,023 characters ...] " in text
    assert text.endswith("x: expected a number\n")
    assert len(text) < 3_000


def test_what_libraries_log_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogRecordFactory()
    logger = logging.getLogger("nemo_rl_moe.test_of_log_messages")
    handler = logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    try:
        escape_log_messages()
        escape_log_messages()
        logger.error("unknown key %s, %d", HOSTILE, 3)
    finally:
        logging.setLogRecordFactory(before)
        logger.removeHandler(handler)
    assert capsys.readouterr().err == "unknown key \\x1b]0;PWNED\\x07\\x1b[2J\\r\\u202e, 3\n"


def test_the_text_of_an_error_has_no_control_characters() -> None:
    error = UserError(["a\x1b]0;x\x07", "b"])
    assert str(error) == "a\\x1b]0;x\\x07\nb"
    assert error.problems == ["a\x1b]0;x\x07", "b"]
