# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The Python tool: what a program prints, and what it cannot do."""

import os
import time
from pathlib import Path

import psutil
import pytest

from nemo_rl_moe.tools.python_interpreter import MOST_BYTES, problem_with_isolation, python

if PROBLEM := problem_with_isolation():
    pytest.skip(PROBLEM, allow_module_level=True)

SHORT_S = 1.0
LONG_S = 60.0


def test_the_output_is_returned() -> None:
    assert python("print(2 ** 10)", timeout_s=LONG_S) == "1024\n"
    assert python("pass", timeout_s=LONG_S) == "(no output; use print)"
    assert python("print('ä', '\\ud800'.encode('utf-8', 'replace'))", timeout_s=LONG_S) == "ä b'?'\n"


def test_an_error_is_returned_with_its_line_and_no_path_of_this_machine() -> None:
    answer = python("x = 1\nprint(x)\nx / 0", timeout_s=LONG_S)
    assert answer.startswith("1\n")
    assert "File program.py, line 3" in answer
    assert answer.endswith("ZeroDivisionError: division by zero\n\nerror: exit code 1")
    assert python("import sys; sys.exit(3)", timeout_s=LONG_S) == "error: exit code 3"


def test_a_program_that_does_not_end_is_ended() -> None:
    assert python("while True: pass", timeout_s=SHORT_S) == "error: the program was ended after 1 s"


@pytest.mark.parametrize("parent", ["pass", pytest.param("time.sleep(1000)", marks=pytest.mark.full)])
def test_what_a_program_has_started_ends_with_it(parent: str, tmp_path: Path) -> None:
    mark = f"mark-{tmp_path.name}-{time.time_ns()}"
    code = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)', '{mark}'], start_new_session=True)\n"
        f"print('started', flush=True)\n{parent}"
    )
    # Long enough that the other process has begun, on a slow machine too: then it is looked for.
    assert python(code, timeout_s=10.0).startswith("started")
    assert not [found for found in psutil.process_iter(["cmdline"]) if mark in (found.info["cmdline"] or [])]


def test_there_is_no_network() -> None:
    answer = python("import socket\nsocket.create_connection(('127.0.0.1', 9), 1)", timeout_s=LONG_S)
    assert "Network is unreachable" in answer


def test_memory_and_files_are_limited() -> None:
    assert "MemoryError" in python("data = bytearray(10 ** 9)", timeout_s=LONG_S, memory_mb=256)
    assert "File too large" in python("open('x', 'wb').write(b'1' * 10 ** 7)", timeout_s=LONG_S)


def test_long_output_is_cut_and_the_model_is_told() -> None:
    answer = python("print('a' * 1_000_000)", timeout_s=LONG_S)
    assert answer == "a" * MOST_BYTES + "\n[output cut at 20,000 bytes]"


def test_secrets_of_the_run_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret-8143")
    assert "secret-8143" not in python("import os\nprint(dict(os.environ))", timeout_s=LONG_S)
    of_run = f"/proc/{os.getpid()}/environ"
    assert Path(of_run).exists()
    assert "FileNotFoundError" in python(f"print(open('{of_run}', 'rb').read())", timeout_s=LONG_S)


def test_a_program_that_kills_its_parents_gets_an_error() -> None:
    assert python("import os\nos.killpg(0, 9)", timeout_s=LONG_S).startswith("error: exit code")
