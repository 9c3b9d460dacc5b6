# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The Python tool: what a program prints, and what it cannot do."""

import os
import socket
import time
from pathlib import Path

import psutil
import pytest

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.tools import python_interpreter
from nemo_rl_moe.tools.definitions import load_tools
from nemo_rl_moe.tools.python_interpreter import MOST_BYTES, problem_with_isolation, python

if PROBLEM := problem_with_isolation({}):
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


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("socket.create_connection(('127.0.0.1', 9), 1)", "Network is unreachable"),
        ("bytearray(10 ** 9)", "MemoryError"),
        ("open('x', 'wb').write(b'1' * 10 ** 7)", "File too large"),
        ("os.killpg(0, 9)", "error: exit code"),
        ("socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)", "PermissionError"),  # each can send to any address
        ("socket.socket(40, socket.SOCK_STREAM)", "PermissionError"),  # of the machine that a virtual one runs on
        ("os.memfd_create('more')", "PermissionError"),  # which no limit counts
    ],
)
def test_what_a_program_may_not_do(code: str, words: str) -> None:
    assert words in python(f"import os, socket\n{code}", timeout_s=LONG_S, memory_mb=256)


def test_long_output_is_cut_and_the_model_is_told() -> None:
    answer = python("print('a' * 1_000_000)", timeout_s=LONG_S)
    assert answer == "a" * MOST_BYTES + "\n[output cut at 20,000 bytes]"


def test_secrets_of_the_run_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret-8143")
    assert "secret-8143" not in python("import os\nprint(dict(os.environ))", timeout_s=LONG_S)
    of_run = f"/proc/{os.getpid()}/environ"
    assert Path(of_run).exists()
    assert "FileNotFoundError" in python(f"print(open('{of_run}', 'rb').read())", timeout_s=LONG_S)


def test_a_program_writes_to_its_own_folder_alone(tmp_path: Path) -> None:
    """It may read what the user may, and can neither change nor remove it, whatever it tries."""
    (tmp_path / "reward.py").write_text("return 0")
    code = f"""
import ctypes, os, shutil
open("own", "w").write("1")
print(open("own").read(), open({str(tmp_path / "reward.py")!r}).read())
libc = ctypes.CDLL(None)
libc.unshare(0x10020000)  # further namespaces of a user and of mounts
libc.mount(None, b"/", None, ctypes.c_ulong(0x1020), None)  # a remount, with the right to write
for target in [{str(tmp_path / "reward.py")!r}, "/dev/shm/x", "/proc/x", "/dev/x", "/tmp/x", "../x"]:
    try:
        open(target, "w")
        print("written", target)
    except OSError as error:
        print(type(error).__name__)
shutil.rmtree({str(tmp_path)!r}, ignore_errors=True)
"""
    answer = python(code, timeout_s=LONG_S).splitlines()
    assert answer[0] == "1 return 0"
    assert len(answer) == 7
    assert set(answer[1:]) <= {"OSError", "FileNotFoundError", "PermissionError"}
    assert (tmp_path / "reward.py").read_text() == "return 0"


def test_servers_of_the_machine_are_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(tmp_path)  # an address has at most a hundred characters
        server.bind("server")
        server.listen()
        code = f"import os, socket\nboth = socket.socketpair()\nboth[0].send(b'1')\nos.chdir({str(tmp_path)!r})\n"
        code += "socket.socket(socket.AF_UNIX).connect('server')"
        assert "PermissionError" in python(code, timeout_s=LONG_S)


def test_the_number_of_processes_is_limited() -> None:
    code = """
import os, time
for number in range(1000):
    try:
        if os.fork() == 0:
            time.sleep(60)
    except BlockingIOError:
        print("refused", 40 < number < 64, flush=True)
        os._exit(0)
"""
    assert python(code, timeout_s=LONG_S) == "refused True\n"


def test_the_size_of_all_files_is_limited() -> None:
    code = """
for number in range(1000):
    try:
        open(f"file_{number}", "wb").write(b"1" * 10**6)
    except OSError as error:
        print(error.strerror, number)
        break
"""
    assert python(code, timeout_s=LONG_S) == "No space left on device 33\n"


def test_a_machine_that_cannot_confine_programs_needs_a_word_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_interpreter, "_problem_with_isolation", lambda: "cannot give up the network")
    with pytest.raises(ConfigurationError, match="which cannot run on this machine: cannot give up the network"):
        load_tools(["python"], {})
    assert load_tools(["python"], {"python": {"allow_unconfined": True}})["python"].settings
    # Without namespaces the program stands in a folder of the machine.
    code = "import os\nprint(os.path.exists('/proc/self'), os.path.exists('program.py'))"
    assert python(code, timeout_s=LONG_S, allow_unconfined=True) == "True True\n"


@pytest.mark.parametrize(
    ("setting", "value"), [("timeout_s", -1), ("timeout_s", 1e18), ("memory_mb", 0), ("memory_mb", 1)]
)
def test_settings_with_which_every_call_fails_are_refused(setting: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=rf"^env\.driver\.parameters\.python\.{setting}: got "):
        load_tools(["python"], {"python": {setting: value}})
