# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The supervisor, as a process of its own, around small drivers that end in every way."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from nemo_rl_moe.distributed.node_tools import SHARED_MEMORY, ray_folder
from nemo_rl_moe.errors import EXIT_FAILURE_TOLD
from tests.functional.sft_runs import running

LIMIT_S = 200.0
SUPERVISOR = """
import sys
from nemo_rl_moe.launch import supervisor
from nemo_rl_moe.launch.supervisor import Supervision, supervise
driver, max_restarts, supervisor.SAME_REQUEST_S = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
sys.exit(supervise(Supervision(
    lambda restart: [sys.executable, "-c", driver, str(restart)],
    max_restarts=max_restarts,
    resume_hint=lambda: "go on like this",
    restart_wait_s=0.05,
    stubborn_s=1.0,
)))
"""
PRELUDE = """
import os, signal, subprocess, sys, time
restart = int(sys.argv[1])

def unblock():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})

def note(pid, name):
    with open(f"{pid}.part", "w") as file:
        file.write(name)
    os.rename(f"{pid}.part", f"{pid}.{name}")

def start_family():
    # One in a session of its own, whose parent has ended, and which ignores whatever can be ignored.
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    start = f"subprocess.Popen([sys.executable, '-c', {code!r}], stdout=subprocess.DEVNULL)"
    middle = f"import subprocess, sys; print({start}.pid)"
    out = subprocess.run([sys.executable, "-c", middle], stdout=subprocess.PIPE, start_new_session=True).stdout
    note(int(out), "orphan")
    note(subprocess.Popen([sys.executable, "-c", code]).pid, "child")
    note(os.getpid(), "driver")
"""
HANGS = "start_family(); time.sleep(600)"
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN); unblock(); start_family(); time.sleep(600)"

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the supervisor with a driver's code; nothing of it stays, whatever happens."""
    started: list[subprocess.Popen[str]] = []

    def start_supervisor(driver: str, max_restarts: int = 0, same_request_s: float = 100.0) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, PRELUDE + driver, str(max_restarts), str(same_request_s)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            # Whoever runs the tests under nohup has hangups ignored, and so has what they start.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )
        started.append(process)
        return process

    yield start_supervisor
    for pid in noted(tmp_path):
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)
    for process in started:
        process.kill()
        process.communicate()


def noted(folder: Path, name: str = "*") -> list[int]:
    return [int(path.stem) for path in folder.glob(f"*.{name}") if path.suffix != ".part"]


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and bool(running([psutil.Process(pid)]))


def wait_for_family(folder: Path, drivers: int = 1) -> list[int]:
    """The processes that the drivers have started, once the latest of them hangs."""
    deadline = time.monotonic() + LIMIT_S
    while len(noted(folder, "driver")) < drivers:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return noted(folder)


def end_of(process: subprocess.Popen[str], folder: Path) -> tuple[int, str]:
    """Exit code and stderr; nothing that was noted may run then."""
    errors = process.communicate(timeout=LIMIT_S)[1]
    assert [pid for pid in noted(folder) if is_running(pid)] == []
    return process.returncode, errors


@pytest.mark.parametrize("code", [0, 2, *(pytest.param(code, marks=pytest.mark.slow) for code in (3, 130)), 143])
def test_the_drivers_exit_code_is_passed_on(start: Start, tmp_path: Path, code: int) -> None:
    assert end_of(start(f"start_family(); sys.exit({code})"), tmp_path) == (code, "")


def test_a_failure_that_the_driver_has_told_is_not_told_again(start: Start, tmp_path: Path) -> None:
    assert end_of(start(f"start_family(); sys.exit({EXIT_FAILURE_TOLD})"), tmp_path) == (1, "go on like this\n")


def test_a_driver_that_ends_without_a_word_is_told_of(start: Start, tmp_path: Path) -> None:
    code, errors = end_of(start("start_family(); os._exit(1)"), tmp_path)
    assert code == 1
    told, hint = errors.splitlines()
    assert told.startswith("error: the run's main process ended with exit code 1 before it could tell why")
    assert hint == "go on like this"


def test_only_failures_are_repeated_and_so_often(start: Start, tmp_path: Path) -> None:
    fails = "open('restarts', 'a').write(f'{restart} '); start_family(); sys.exit(70 if restart < 2 else 2)"
    code, errors = end_of(start(fails, max_restarts=5), tmp_path)
    assert (code, (tmp_path / "restarts").read_text()) == (2, "0 1 2 ")
    assert [line.partition(":")[0] for line in errors.splitlines()] == ["restart 1 of 5", "restart 2 of 5"]

    (tmp_path / "restarts").unlink()
    code, errors = end_of(start("open('restarts', 'a').write(f'{restart} '); sys.exit(70)", max_restarts=2), tmp_path)
    assert (code, (tmp_path / "restarts").read_text()) == (1, "0 1 2 ")
    assert errors.splitlines()[-1] == "go on like this"
    assert errors.count("go on like this") == 1

    (tmp_path / "restarts").unlink()
    code, errors = end_of(start("open('restarts', 'a').write(f'{restart} '); sys.exit(3)", max_restarts=2), tmp_path)
    assert (code, (tmp_path / "restarts").read_text()) == (3, "0 ")


def test_the_driver_is_killed(start: Start, tmp_path: Path) -> None:
    process = start(HANGS, max_restarts=1)
    for number in (1, 2):
        wait_for_family(tmp_path, drivers=number)
        (driver,) = filter(is_running, noted(tmp_path, "driver"))
        os.kill(driver, signal.SIGKILL)
    code, errors = end_of(process, tmp_path)
    assert code == 1
    assert len(noted(tmp_path, "orphan")) == 2
    killed, restart, killed_again, hint = errors.splitlines()
    assert killed == killed_again
    assert killed.startswith("error: the run's main process was killed by SIGKILL")
    assert restart.startswith("restart 1 of 1: the run's main process was killed by SIGKILL")
    assert hint == "go on like this"


@pytest.mark.parametrize("who", ["front", "guardian"])
def test_a_supervisor_is_killed(start: Start, tmp_path: Path, who: str) -> None:
    process = start(HANGS)
    family = wait_for_family(tmp_path)
    (guardian,) = psutil.Process(process.pid).children()
    (driver,) = noted(tmp_path, "driver")
    folders = [
        ray_folder(driver),
        *(
            parent / f"nemo_rl_moe-test-{socket.gethostname()}-{driver}-abc"
            for parent in (Path(tempfile.gettempdir()), SHARED_MEMORY)
        ),
    ]
    for folder in folders:
        folder.mkdir()
    os.kill(process.pid if who == "front" else guardian.pid, signal.SIGKILL)
    process.wait(LIMIT_S)
    deadline = time.monotonic() + LIMIT_S
    while [folder for folder in folders if folder.exists()] or [
        pid for pid in (*family, guardian.pid) if is_running(pid)
    ]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if who == "guardian":
        assert process.returncode == 1
        assert process.communicate()[1].splitlines()[-1] == "go on like this"


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        (signal.SIGINT, "SIGINT"),
        pytest.param(signal.SIGTERM, "SIGTERM", marks=pytest.mark.slow),
        (signal.SIGHUP, "SIGTERM"),
    ],
)
def test_a_request_reaches_the_driver_alone_and_once(
    start: Start, tmp_path: Path, sent: signal.Signals, received: str
) -> None:
    driver = """
got = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, frame: got.append(signal.Signals(number).name))
unblock()
start_family()
while not got:
    time.sleep(0.01)
time.sleep(0.8)
open("got", "w").write(" ".join(got))
"""
    process = start(driver, max_restarts=3)
    family = wait_for_family(tmp_path)
    (guardian,) = psutil.Process(process.pid).children()
    # A batch system signals all of them.
    process.send_signal(sent)
    time.sleep(0.2)
    guardian.send_signal(sent)
    others = [pid for pid in family if pid not in noted(tmp_path, "driver")]
    time.sleep(0.2)
    assert all(map(is_running, others)), "the supervisor passes it on to the driver only"
    assert end_of(process, tmp_path) == (0, "")
    assert (tmp_path / "got").read_text() == received


def test_no_restart_after_a_request(start: Start, tmp_path: Path) -> None:
    driver = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(70)); unblock(); start_family(); time.sleep(600)"
    process = start(driver, max_restarts=3)
    wait_for_family(tmp_path)
    process.send_signal(signal.SIGTERM)
    assert end_of(process, tmp_path) == (1, "go on like this\n")


@pytest.mark.slow
def test_a_driver_that_does_not_follow_is_killed_after_the_second_request(start: Start, tmp_path: Path) -> None:
    process = start(STUBBORN, max_restarts=3, same_request_s=0.5)
    wait_for_family(tmp_path)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.3)
    process.send_signal(signal.SIGTERM)
    assert end_of(process, tmp_path) == (143, "")


def test_a_driver_that_ray_ends_while_it_follows_a_request_was_stopped(start: Start, tmp_path: Path) -> None:
    """A stop while workers start: Ray's servers may go before the driver, which Ray then ends with exit code 1."""
    driver = """
signal.signal(signal.SIGTERM, lambda number, frame: os._exit(1))
unblock()
start_family()
time.sleep(30)
"""
    process = start(driver, max_restarts=3)
    wait_for_family(tmp_path)
    process.send_signal(signal.SIGTERM)
    assert end_of(process, tmp_path) == (143, "go on like this\n")


@pytest.mark.slow
def test_a_request_while_it_waits_to_start_again(start: Start, tmp_path: Path) -> None:
    process = start("note(os.getpid(), 'driver'); sys.exit(70)", max_restarts=30)
    wait_for_family(tmp_path, drivers=6)  # the wait is seconds long then
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert end_of(process, tmp_path)[0] == 130


def test_hangups_are_left_to_nohup(start: Start, tmp_path: Path) -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start("start_family(); time.sleep(0.5)")
    finally:
        signal.signal(signal.SIGHUP, former)
    wait_for_family(tmp_path)
    process.send_signal(signal.SIGHUP)
    assert end_of(process, tmp_path) == (0, "")


def test_others_children_are_spared_and_the_environment_is_added_to(tmp_path: Path) -> None:
    code = """
import json, os, subprocess, sys
from nemo_rl_moe.launch.supervisor import Supervision, supervise
mine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
driver = "import os, sys; sys.exit(int(os.environ['CODE']) + (sys.stdin.read() != ''))"
code = supervise(Supervision(lambda restart: [sys.executable, "-c", driver], environment={"CODE": "7"}))
print(json.dumps([code, mine.poll()]))
mine.kill()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=LIMIT_S, cwd=tmp_path, check=True
    )
    assert json.loads(done.stdout) == [7, None]
