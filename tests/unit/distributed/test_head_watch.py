# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nemo_rl_moe.distributed import head_watch
from nemo_rl_moe.distributed.head_watch import LocalHead, RemoteHead
from nemo_rl_moe.distributed.node_tools import ProcessIdentity
from nemo_rl_moe.errors import EXIT_FAILURE_TOLD

PROGRAM = """
import atexit, sys, time
from nemo_rl_moe.distributed import head_watch

class DyingHead:
    period_s = 0.02
    def problem(self):
        return "Ray's raylet has died" if time.monotonic() > start + 0.2 else None
    def bury(self):
        print("buried", flush=True)

def crash_like_ray():
    print("Ray's end")

head_watch.UNWINDING_S = 0.5
start = time.monotonic()
atexit.register(crash_like_ray)
watch = head_watch.HeadWatch(DyingHead())
atexit.register(lambda: print("the loggers' end"))
while watch.failure is None:
    time.sleep(0.01)
watch.stop()
"""


def run_program(ending: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM + ending], capture_output=True, text=True, timeout=30)


def test_a_program_that_ends_in_order_leaves_out_rays_end() -> None:
    done = run_program("print(watch.failure, file=sys.stderr); sys.exit(7)")
    assert (done.returncode, done.stderr) == (EXIT_FAILURE_TOLD, "Ray's raylet has died\n")
    # Whether the servers are buried before the program has ended is a matter of luck.
    assert done.stdout.removeprefix("buried\n") == "the loggers' end\n"


def test_a_program_that_hangs_is_ended() -> None:
    done = run_program("time.sleep(600)")
    assert (done.returncode, done.stderr) == (EXIT_FAILURE_TOLD, "error: Ray's raylet has died\n")


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[psutil.Process]]:
    """Processes with the names of Ray's, and another."""
    started = []
    for name in ("gcs_server", "raylet", "other"):
        path = shutil.copy(shutil.which("sleep") or "", tmp_path / name)
        started.append(subprocess.Popen([path, "600"]))
    yield [psutil.Process(process.pid) for process in started]
    for process in started:
        process.kill()
        process.wait()


def others_than(servers: list[psutil.Process]) -> set[ProcessIdentity]:
    """All children of this process but these: some belong to other tests."""
    return {ProcessIdentity.of(child) for child in psutil.Process().children() if child not in servers}


@pytest.mark.parametrize("victim", [0, 1])
def test_a_local_server_dies(servers: list[psutil.Process], victim: int) -> None:
    name = servers[victim].name()
    survivor, other = ProcessIdentity.of(servers[1 - victim]), ProcessIdentity.of(servers[2])
    head = LocalHead(others_than(servers[:2]))
    assert head.problem() is None
    servers[victim].kill()
    deadline = time.monotonic() + 5.0
    while (problem := head.problem()) is None:
        assert time.monotonic() < deadline
    assert problem == f"Ray's {name} (pid {servers[victim].pid}) on this machine has died"
    head.bury()
    assert not survivor.find()
    assert other.find(), "what was there before is not Ray's"


def test_what_is_started_after_ray_is_not_buried_with_it(servers: list[psutil.Process]) -> None:
    head = LocalHead(others_than(servers))
    head.note_all_started()
    with subprocess.Popen(["sleep", "600"]) as service:
        servers[0].kill()
        head.bury()
        assert not sum(server.is_running() and server.status() != psutil.STATUS_ZOMBIE for server in servers)
        assert service.poll() is None
        service.kill()


def test_servers_of_another_ray_are_not_watched(servers: list[psutil.Process]) -> None:
    head = LocalHead({ProcessIdentity.of(server) for server in servers})
    servers[0].kill()
    assert head.problem() is None


def test_a_remote_head_goes_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_watch, "SILENCE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        head = RemoteHead(address)
        time.sleep(0.4)
        assert head.problem() is None
    assert head.problem() is None, "a moment of silence is none"
    time.sleep(0.4)
    assert head.problem() == f"the head of the Ray cluster at {address} has not answered for 0 s"
