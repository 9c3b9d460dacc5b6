# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The supervisor, as a process of its own, around small runs that end in every way."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.quick_list import some_of
from tests.support.small_programs import PRELUDE, end_of, is_running, noted, started, wait_for_family

SUPERVISOR = """
import sys
from nemo_rl_moe.launch.supervisor import Supervision, supervise
code, max_restarts = sys.argv[1], int(sys.argv[2])
sys.exit(supervise(Supervision(
    lambda restart: [sys.executable, "-c", code, str(restart)],
    stdin="resolved",
    max_restarts=max_restarts,
    resume_hint=lambda: "go on like this",
    restart_wait_s=0.05,
)))
"""
RUN = f"""{PRELUDE}
restart = int(sys.argv[1])
watch_this_process()
"""
HANGS = "start_family(); time.sleep(600)"

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the supervisor with the code of a run."""
    with ExitStack() as stack:
        yield lambda code, max_restarts=1: stack.enter_context(
            started([sys.executable, "-c", SUPERVISOR, RUN + code, str(max_restarts)], tmp_path)
        )


@pytest.mark.parametrize("code", some_of([0, 2, 3, 143], 2))
def test_an_exit_code_of_no_failure_is_passed_on(start: Start, tmp_path: Path, code: int) -> None:
    assert end_of(start(f"start_family(); sys.exit({code})"), tmp_path) == (code, "")


@pytest.mark.full
def test_only_failures_are_repeated_and_so_often(start: Start, tmp_path: Path) -> None:
    fails = "open('restarts', 'a').write(f'{restart} '); start_family(); sys.exit(1 if restart < 2 else 2)"
    code, errors = end_of(start(fails, max_restarts=5), tmp_path)
    assert (code, (tmp_path / "restarts").read_text()) == (2, "0 1 2 ")
    assert [line.partition(":")[0] for line in errors.splitlines()] == ["restart 1 of 5", "restart 2 of 5"]

    (tmp_path / "restarts").unlink()
    code, errors = end_of(start("open('restarts', 'a').write(f'{restart} '); sys.exit(1)", max_restarts=2), tmp_path)
    assert (code, (tmp_path / "restarts").read_text()) == (1, "0 1 2 ")
    assert errors.splitlines()[-1] == "go on like this"
    assert errors.count("go on like this") == 1

    (tmp_path / "restarts").unlink()
    code, errors = end_of(start("open('restarts', 'a').write(f'{restart} '); sys.exit(3)", max_restarts=2), tmp_path)
    assert (code, (tmp_path / "restarts").read_text()) == (3, "0 ")


def test_each_start_reads_the_same_configuration(start: Start, tmp_path: Path) -> None:
    code, _ = end_of(start("open('read', 'a').write(sys.stdin.read() + ' '); sys.exit(1)", max_restarts=1), tmp_path)
    assert (code, (tmp_path / "read").read_text()) == (1, "resolved resolved ")


def test_the_run_is_killed(start: Start, tmp_path: Path) -> None:
    process = start(HANGS, max_restarts=1)
    for number in (1, 2):
        wait_for_family(tmp_path, runs=number)
        (run,) = filter(is_running, noted(tmp_path, "run"))
        os.kill(run, signal.SIGKILL)
    code, errors = end_of(process, tmp_path)
    assert code == 1
    assert len(noted(tmp_path, "orphan")) == 2
    killed, restart, killed_again, hint = errors.splitlines()
    for line in (killed, killed_again):
        assert line.startswith("error: the run's main process (pid ")
    assert restart.startswith("restart 1 of 1: the run's main process was killed by SIGKILL")
    assert hint == "go on like this"


def test_the_supervisor_is_killed(start: Start, tmp_path: Path) -> None:
    process = start(HANGS)
    wait_for_family(tmp_path)
    process.kill()
    assert end_of(process, tmp_path)[0] == -signal.SIGKILL


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        (signal.SIGINT, "SIGINT"),
        pytest.param(signal.SIGTERM, "SIGTERM", marks=pytest.mark.slow),
        (signal.SIGHUP, "SIGTERM"),
        (signal.SIGUSR1, "SIGUSR1"),
    ],
)
def test_a_request_reaches_the_run_alone(start: Start, tmp_path: Path, sent: signal.Signals, received: str) -> None:
    code = """
got = []
for number in run_process.STOP_SIGNALS:
    signal.signal(number, lambda number, frame: got.append(signal.Signals(number).name))
signal.pthread_sigmask(signal.SIG_UNBLOCK, run_process.STOP_SIGNALS)
start_family()
while not got:
    time.sleep(0.01)
time.sleep(0.8)
open("got", "w").write(" ".join(got))
"""
    process = start(code, max_restarts=3)
    family = wait_for_family(tmp_path)
    process.send_signal(sent)
    others = [pid for pid in family if pid not in noted(tmp_path, "run")]
    time.sleep(0.2)
    assert all(map(is_running, others)), "the supervisor passes it on to the run only"
    assert end_of(process, tmp_path) == (0, "")
    assert (tmp_path / "got").read_text() == received


def test_no_restart_after_a_request(start: Start, tmp_path: Path) -> None:
    code = (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\n"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, run_process.STOP_SIGNALS)\n"
        "start_family(); time.sleep(600)"
    )
    process = start(code, max_restarts=3)
    wait_for_family(tmp_path)
    process.send_signal(signal.SIGTERM)
    assert end_of(process, tmp_path) == (1, "go on like this\n")


@pytest.mark.slow
def test_a_request_while_it_waits_to_start_again(start: Start, tmp_path: Path) -> None:
    process = start("note(os.getpid(), 'run'); sys.exit(1)", max_restarts=30)
    pids = wait_for_family(tmp_path, runs=6)  # the wait is seconds long then
    while any(map(is_running, pids)):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert end_of(process, tmp_path)[0] == 130


@pytest.mark.full
def test_hangups_are_left_to_nohup(start: Start, tmp_path: Path) -> None:
    process = start("start_family(); time.sleep(0.5)")
    process.kill()
    command = ["nohup", sys.executable, "-c", SUPERVISOR, f"{RUN}start_family(); time.sleep(0.5)", "1"]
    with started(command, tmp_path) as process:
        wait_for_family(tmp_path)
        process.send_signal(signal.SIGHUP)
        code, _ = end_of(process, tmp_path)
    assert code == 0
