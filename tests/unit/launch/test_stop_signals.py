# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests to stop, sent as real signals to a real process that holds them back until it has its handlers."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

LIMIT_S = 200.0
PROGRAM = """
import signal, sys, time
from nemo_rl_moe.distributed import run_process
from nemo_rl_moe.distributed.run_process import StopSignals

run_process.SAME_REQUEST_S = float(sys.argv[1])

def say(text):
    print(text, flush=True)

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
say("started")
sys.stdin.readline()
try:
    with StopSignals() as stop:
        say("ready")
        sys.stdin.readline()
        with stop.graceful():
            say("in the loop")
            while stop.reason() is None:
                time.sleep(0.02)
            say(f"asked by {stop.reason()}")
            if sys.stdin.readline() == "end now\\n":
                stop.end_now()
        say("saved")
except KeyboardInterrupt:
    say("KeyboardInterrupt")
    sys.exit(130)
"""


@pytest.fixture
def program(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """Start the program; the parameter is the seconds within which signals belong to one request."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(getattr(request, "param", 100.0))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert next_line(process) == "started"
            yield process
        finally:
            process.kill()


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip()


def go_on(process: subprocess.Popen[str], how: str = "") -> str:
    """Lets the program leave the place where it waits, and returns what it says next."""
    assert process.stdin is not None
    process.stdin.write(f"{how}\n")
    process.stdin.flush()
    return next_line(process)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_the_loop_the_first_one_is_a_request(program: subprocess.Popen[str], number: signal.Signals) -> None:
    go_on(program)
    assert go_on(program) == "in the loop"
    program.send_signal(number)
    assert next_line(program) == f"asked by {number.name}"
    program.send_signal(signal.SIGTERM)  # to the same request: a batch system and the supervisor both sent it
    assert go_on(program) == "saved"
    assert program.wait(LIMIT_S) == 0
    assert program.stderr is not None
    assert f"{number.name}: the run stops after this step" in program.stderr.read()


@pytest.mark.parametrize("program", [0.5], indirect=True)
def test_in_the_loop_the_second_one_ends_it_at_once(program: subprocess.Popen[str]) -> None:
    go_on(program)
    assert go_on(program) == "in the loop"
    program.send_signal(signal.SIGINT)
    assert next_line(program) == "asked by SIGINT"
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(1.2)  # it waits for its stdin
    program.send_signal(signal.SIGTERM)
    assert program.wait(LIMIT_S) == 143


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_loop_that_has_nothing_to_keep_ends_as_if_it_had_not_begun(
    program: subprocess.Popen[str], number: signal.Signals, code: int
) -> None:
    go_on(program)
    assert go_on(program) == "in the loop"
    program.send_signal(number)
    assert next_line(program) == f"asked by {number.name}"
    go_on(program, "end now")
    assert program.wait(LIMIT_S) == code


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_outside_of_the_loop_the_first_one_ends_it(
    program: subprocess.Popen[str], number: signal.Signals, code: int
) -> None:
    assert go_on(program) == "ready"
    program.send_signal(number)
    assert program.wait(LIMIT_S) == code


def test_one_that_comes_before_the_handlers_is_kept(program: subprocess.Popen[str]) -> None:
    program.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.3)
    assert go_on(program) == "KeyboardInterrupt"
    assert program.wait(LIMIT_S) == 130


WAITS_FOR_RAY = """
import threading
import time
import ray
from nemo_rl_moe.distributed.run_process import StopSignals

has_started = threading.Event()

def start_and_stay():  # on the main thread, Ray takes the signals for itself; its servers end with their thread
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    has_started.set()
    time.sleep(600)

@ray.remote
def never():
    time.sleep(600)

try:
    with StopSignals():
        threading.Thread(target=start_and_stay, daemon=True).start()
        has_started.wait()
        waited_for = never.remote()
        print("waits", flush=True)
        ray.get(waited_for)
except SystemExit as error:
    print("code", error.code, flush=True)
"""


@pytest.mark.full
def test_a_signal_that_comes_while_ray_is_waited_for_keeps_its_code() -> None:
    """Ray raises SystemExit(1) in the place of what the handler has raised."""
    with subprocess.Popen([sys.executable, "-c", WAITS_FOR_RAY], stdout=subprocess.PIPE, text=True) as program:
        try:
            assert next_line(program) == "waits"
            program.send_signal(signal.SIGTERM)
            assert next_line(program) == "code 143"
        finally:
            program.kill()
