# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The watcher of a run's process, as a process of its own, around small runs that end in every way."""

import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from nemo_rl_moe.distributed.node_tools import SHARED_MEMORY, ray_folder
from nemo_rl_moe.distributed.run_process import WATCHER_NAME, StopSignals
from tests.support.small_programs import LIMIT_S, PRELUDE, end_of, is_running, noted, started, wait_for_family

RUN = f"""{PRELUDE}
run_process.SAME_REQUEST_S = float(sys.argv[1])
run_process.STUBBORN_S = 1.0
watch_this_process(lambda: print("go on like this", file=sys.stderr))
"""
SUDDEN = r"error: the run's main process \(pid \d+\) ended before it could say why: .*\n"

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a run with the code of its rest."""
    with ExitStack() as stack:
        yield lambda code, same_request_s=100.0: stack.enter_context(
            started([sys.executable, "-c", RUN + code, str(same_request_s)], tmp_path)
        )


@pytest.mark.parametrize("code", [0, 1, 2, 143])
def test_a_run_that_ends_in_order_leaves_nothing_when_it_has_ended(start: Start, tmp_path: Path, code: int) -> None:
    process = start(f"start_family(); sys.exit({code})")
    assert process.wait(LIMIT_S) == code
    assert [pid for pid in noted(tmp_path) if is_running(pid)] == []
    assert end_of(process, tmp_path) == (code, "")


@pytest.mark.parametrize(
    ("end", "code"), [("os._exit(1)", 1), ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL)]
)
def test_a_run_that_ends_without_a_word_is_reported(start: Start, tmp_path: Path, end: str, code: int) -> None:
    found, errors = end_of(start(f"start_family(); {end}"), tmp_path)
    assert found == code
    assert re.fullmatch(rf"{SUDDEN}go on like this\n", errors)


def test_an_end_that_was_reported_is_not_reported_again(start: Start, tmp_path: Path) -> None:
    assert end_of(start("start_family(); run_process.leave(1)"), tmp_path) == (1, "go on like this\n")


def test_a_killed_run_leaves_no_folder(start: Start, tmp_path: Path) -> None:
    process = start("start_family(); time.sleep(600)")
    wait_for_family(tmp_path)
    folders = [
        ray_folder(process.pid),
        *(
            parent / f"nemo_rl_moe-test-{socket.gethostname()}-{process.pid}-abc"
            for parent in (Path(tempfile.gettempdir()), SHARED_MEMORY)
        ),
    ]
    for folder in folders:
        folder.mkdir()
    process.kill()
    assert end_of(process, tmp_path)[0] == -signal.SIGKILL
    assert not any(folder.exists() for folder in folders)


def test_frozen_processes_and_those_with_a_title_of_their_own_end_too(start: Start, tmp_path: Path) -> None:
    """Ray's workers write their titles over their command lines."""
    titled = (
        "import time; from ray._raylet import setproctitle; setproctitle('ray::Worker' + 500 * '.');"
        "print('ready', flush=True); time.sleep(600)"
    )
    process = start(
        f"child = subprocess.Popen([sys.executable, '-c', {titled!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); note(child.pid, 'titled')\n"
        "start_family(); time.sleep(600)"
    )
    for pid in wait_for_family(tmp_path):
        if pid != process.pid:
            os.kill(pid, signal.SIGSTOP)
    process.kill()
    assert end_of(process, tmp_path)[0] == -signal.SIGKILL


def test_a_run_whose_watcher_is_killed_goes_on(start: Start, tmp_path: Path) -> None:
    process = start(
        "start_family()\nwith StopSignals() as stop, stop.graceful():\n"
        "    while stop.reason() is None: time.sleep(0.01)"
    )
    wait_for_family(tmp_path)
    (watcher,) = (child for child in psutil.Process(process.pid).children() if child.name() == WATCHER_NAME)
    watcher.kill()
    process.send_signal(signal.SIGTERM)
    code, errors = end_of(process, tmp_path)
    assert code == 0
    assert "SIGTERM: the run stops after this step" in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_run_that_is_stopped_says_so_itself(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    process = start("with StopSignals():\n    start_family(); time.sleep(600)")
    family = wait_for_family(tmp_path)
    for child in psutil.Process(process.pid).children():  # a batch system signals all of them
        child.send_signal(number)
    others = [pid for pid in family if pid in noted(tmp_path, "orphan")]
    assert all(map(is_running, others))
    process.send_signal(number)
    code, errors = end_of(process, tmp_path)
    assert code == (-number if number == signal.SIGINT else 143)
    assert "main process" not in errors


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_request_to_stop_is_named_and_may_be_ignored(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    former = signal.getsignal(number)
    try:
        signal.signal(number, signal.SIG_DFL)
        with StopSignals() as stop, stop.graceful():
            os.kill(os.getpid(), number)
            assert stop.reason() == number.name
        assert f"{number.name}: the run stops after this step" in capfd.readouterr().err
        signal.signal(number, signal.SIG_IGN)
        with StopSignals() as stop, stop.graceful():
            os.kill(os.getpid(), number)
            assert stop.reason() is None
    finally:
        signal.signal(number, former)


@pytest.mark.full
def test_a_run_that_hangs_in_a_library_is_killed_after_the_second_request(start: Start, tmp_path: Path) -> None:
    """Its main thread gets to no handler; the watcher hears of the signals all the same."""
    process = start(
        "import ctypes\n"
        "reader, _ = os.pipe()\n"
        "with StopSignals():\n"
        "    signal.siginterrupt(signal.SIGTERM, False)\n"
        "    start_family(); ctypes.CDLL(None).read(reader, ctypes.create_string_buffer(1), 1)",
        same_request_s=0.3,
    )
    wait_for_family(tmp_path)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5)
    process.send_signal(signal.SIGTERM)
    code, errors = end_of(process, tmp_path)
    assert code == -signal.SIGKILL
    assert "main process" not in errors


def test_a_debugger_has_the_terminal(tmp_path: Path) -> None:
    """`breakpoint()` reads from the terminal in which the command was started; Ctrl-C there leads back to it."""
    code = (
        f"{RUN}\nwith StopSignals():\n    answer = 40\n    breakpoint()\n    print('read', answer)\n    time.sleep(600)"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        os.execv(sys.executable, [sys.executable, "-c", code, "100"])
    try:
        wait_for_text(terminal, "(Pdb)")
        os.write(terminal, b"answer += 2\nc\n")
        wait_for_text(terminal, "read 42")
        os.write(terminal, b"\x03")
        wait_for_text(terminal, "Program interrupted")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


def wait_for_text(terminal: int, text: str) -> None:
    deadline, seen = time.monotonic() + LIMIT_S, ""
    while text not in seen:
        assert time.monotonic() < deadline, seen
        if select.select([terminal], [], [], 1.0)[0]:
            seen += os.read(terminal, 4096).decode(errors="replace")
