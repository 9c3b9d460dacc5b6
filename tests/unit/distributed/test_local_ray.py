# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The local Ray around stand-ins for its servers: a death is noticed, the others are ended, and the program ends."""

import ctypes
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray

from nemo_rl_moe.distributed import local_ray
from nemo_rl_moe.distributed.local_ray import (
    MOST_REMOVALS,
    MOST_STARTS,
    SMALLEST_OBJECT_STORE_BYTES,
    USUAL_OBJECT_STORE_BYTES,
    LocalRay,
    last_error,
    object_store_bytes,
    preserved_handlers,
)
from nemo_rl_moe.distributed.node_tools import end_processes, ray_folder
from nemo_rl_moe.errors import EXIT_RUN_FAILED

PROGRAM = """
import atexit, os, shutil, subprocess, sys, time
import psutil
from nemo_rl_moe.distributed import local_ray

folder, victim, unwinding_s = sys.argv[1:]

def start(program, title=""):
    words = [title or program, "600"]
    return psutil.Popen(words, executable=program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

class FakeRay(local_ray.LocalRay):
    def _start(self, num_cpus):
        names = ("gcs_server", "raylet", "agent")
        title = f"started with {self._folder}/ray"
        self.started = {name: start(os.path.join(folder, name), title) for name in names}
        FakeRay.meanwhile = start(shutil.which("sleep"))
        if victim == "at the start":
            self.started["raylet"].kill()
            raise RuntimeError("Ray waits in vain")

def crash_like_ray():
    print("Ray's end")

local_ray.UNWINDING_S = float(unwinding_s)
atexit.register(crash_like_ray)
other = start(os.path.join(folder, "raylet"))
try:
    fake = FakeRay(1)
except Exception as error:
    other.kill()
    FakeRay.meanwhile.kill()
    sys.exit(str(error))
atexit.register(lambda: print("the loggers' end"))
service = start(shutil.which("sleep"))
time.sleep(0.3)
assert fake.failure is None
fake.started[victim].kill()
while fake.failure is None:
    time.sleep(0.01)
gone, alive = psutil.wait_procs(list(fake.started.values()), timeout=100.0)
assert not alive, alive
goes_on = [process.is_running() for process in (other, FakeRay.meanwhile, service)]
for process in (other, FakeRay.meanwhile, service):
    process.kill()
assert goes_on == [True] * 3, "they are not Ray's"
"""

WORKER = """
import os, signal, subprocess, sys
from nemo_rl_moe.distributed.worker_process import outlive_requests_to_stop
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
outlive_requests_to_stop()
os.kill(os.getpid(), signal.SIGTERM)
started = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"], stdout=-1)
started.stdout.readline()
started.terminate()
forked = os.fork()
if forked == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
print(started.wait(), os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]))
"""


STOPPED_IN_THE_START = """
import os, signal, threading, time
from nemo_rl_moe.distributed.local_ray import LocalRay
from nemo_rl_moe.distributed.node_tools import ray_folder
from nemo_rl_moe.distributed.run_process import StopSignals

def stop_in_the_start():
    while not (ray_folder(os.getpid()) / "ray").is_dir():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)

with StopSignals():
    threading.Thread(target=stop_in_the_start, daemon=True).start()
    LocalRay(num_cpus=1)
    time.sleep(1.0)
"""


LATE_AGENTS = """
import fcntl, os, sys, time
# On the command line of this process, which Python has not read yet. Only of the first so many.
if any(argument.endswith("dashboard/agent.py") for argument in sys.orig_argv):
    with open(os.environ["LATE_AGENTS"], "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        left = int(file.read())
        file.seek(0)
        file.write(str(max(0, left - 1)))
    if left:
        time.sleep(40)
"""

WITH_LATE_AGENTS = """
import subprocess
from concurrent.futures import ThreadPoolExecutor
import ray
from nemo_rl_moe.distributed.local_ray import LocalRay
from nemo_rl_moe.errors import WorkerDiedError

pool = ThreadPoolExecutor(1)  # Ray's servers end with the thread that has started them
start = pool.submit(LocalRay, num_cpus=1)
meanwhile = subprocess.Popen(["sleep", "600"])
try:
    local = start.result()
except WorkerDiedError as error:
    raise SystemExit(str(error))
finally:
    goes_on = meanwhile.poll() is None
    meanwhile.kill()
    assert goes_on, "it is not Ray's"

@ray.remote
def answer():
    return 42

print(ray.get(answer.remote()), local.failure)
local.shutdown()
"""


PRIVATE = """
import os, stat
from pathlib import Path
from nemo_rl_moe.distributed.local_ray import LocalRay
from nemo_rl_moe.distributed.node_tools import ray_folder

def mode(path):
    return f"{stat.S_IMODE(path.stat().st_mode):o}"

os.umask(0)
ray = LocalRay(num_cpus=1)
print(mode(Path.home() / ".ray" / "auth_token"), mode(ray_folder(os.getpid())))
ray.shutdown()
print(ray_folder(os.getpid()).exists())
"""


@pytest.fixture
def starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalRay:
    """Ray whose servers are not started: `ray.init` says what its folder holds."""

    def init(*, _temp_dir: str, **options: object) -> None:
        folder = Path(_temp_dir).parent
        raise RuntimeError(f"starts with {sorted(path.name for path in folder.iterdir())}")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(local_ray, "POLL_S", 0.0)
    found = LocalRay.__new__(LocalRay)  # without its watch
    found._folder, found._object_store_bytes = tmp_path / "folder", 0
    return found


@pytest.mark.parametrize("num_writes", [0, 1, MOST_REMOVALS - 1, MOST_REMOVALS])
def test_a_start_waits_until_nobody_writes_into_its_folder(
    starting: LocalRay, num_writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of a failed start writes once more after so many removals."""
    remove, folder, left = shutil.rmtree, starting._folder, [num_writes]

    def remove_beside_a_server(path: Path, *, ignore_errors: bool) -> None:
        remove(path, ignore_errors=ignore_errors)
        if left[0]:
            left[0] -= 1
            write()

    def write() -> None:
        folder.mkdir()
        (folder / "raylet.out").touch()

    monkeypatch.setattr(shutil, "rmtree", remove_beside_a_server)
    write()
    if num_writes < MOST_REMOVALS:
        with pytest.raises(RuntimeError, match=r"^starts with \[\]$"):
            starting._start(num_cpus=1)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    else:
        with pytest.raises(FileExistsError):
            starting._start(num_cpus=1)


def test_the_object_store_is_small() -> None:
    assert SMALLEST_OBJECT_STORE_BYTES <= object_store_bytes() <= USUAL_OBJECT_STORE_BYTES


def test_the_object_store_holds_what_a_run_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    gigabyte = 10**9
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=400 * gigabyte))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=1000 * gigabyte))
    assert object_store_bytes() == USUAL_OBJECT_STORE_BYTES
    assert object_store_bytes(13 * gigabyte) == USUAL_OBJECT_STORE_BYTES + 13 * gigabyte
    assert object_store_bytes(2000 * gigabyte) == 300 * gigabyte, "at most Ray's own share of the memory"
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10 * gigabyte))
    assert object_store_bytes(13 * gigabyte) == 8 * gigabyte, "shared memory is scarce"
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=gigabyte))
    assert object_store_bytes(gigabyte) == USUAL_OBJECT_STORE_BYTES, "never less for it"


def test_ray_takes_over_neither_signals_nor_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray._private.worker, "print_to_stdstream", ray._private.worker.print_to_stdstream)
    former = signal.getsignal(signal.SIGTERM)
    with preserved_handlers():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) == former
    ray._private.worker.print_to_stdstream({"lines": ["a page"], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    assert capsys.readouterr() == ("", "")


def test_ray_that_starts_in_a_thread_leaves_the_programs_handler() -> None:
    received: list[int] = []

    def start() -> None:
        with preserved_handlers():
            ctypes.CDLL(None).signal(signal.SIGTERM, int(signal.SIG_IGN))  # by the system's call, as Ray's library does

    former = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, former)
    assert received == [signal.SIGTERM]


@pytest.mark.full
def test_a_request_to_stop_while_ray_starts_is_the_programs() -> None:
    process = subprocess.Popen([sys.executable, "-c", STOPPED_IN_THE_START])
    family: list[psutil.Process] = []
    try:
        while process.poll() is None:
            family = psutil.Process(process.pid).children(recursive=True) or family
            time.sleep(0.05)
    finally:
        end_processes(family)  # a run's supervisor does
        shutil.rmtree(ray_folder(process.pid), ignore_errors=True)
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.slow
def test_token_and_folder_are_their_owners_alone(tmp_path: Path) -> None:
    """Anyone with the token can run code in Ray; a home without one gets it from Ray, readable by everybody."""
    environment = {**os.environ, "HOME": str(tmp_path), "RAY_AUTH_MODE": "token"}
    done = subprocess.run(
        [sys.executable, "-c", PRIVATE], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.stdout == "600 700\nFalse\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("num_late", [1, 5])
def test_ray_whose_agents_are_late_is_started_again(tmp_path: Path, num_late: int) -> None:
    (tmp_path / "sitecustomize.py").write_text(LATE_AGENTS)
    (tmp_path / "late").write_text(str(num_late))
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}",
        "LATE_AGENTS": str(tmp_path / "late"),
    }
    done = subprocess.run(
        [sys.executable, "-c", WITH_LATE_AGENTS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    again = done.stderr.count("starting Ray again")
    if num_late == 1:
        assert (done.returncode, done.stdout, again) == (0, "42 None\n", 1), done.stderr
    else:
        assert (done.returncode, done.stdout, again) == (EXIT_RUN_FAILED, "", MOST_STARTS - 1), done.stderr
        assert "_port_" in done.stderr.splitlines()[-1], "the file that Ray waited for"


def test_a_worker_outlives_sigterm_and_what_it_starts_does_not() -> None:
    done = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, timeout=280)
    assert done.stdout == f"{-signal.SIGTERM} {-signal.SIGTERM}\n", done.stderr


def test_a_servers_last_error_is_reported(tmp_path: Path) -> None:
    log = tmp_path / "raylet.out"
    assert last_error(log) == ""
    log.write_text("[2026-01-02 03:04:05,678 I 12 34] (raylet) main.cc:1: all is well\nnot a line of the log\n")
    assert last_error(log) == ""
    with log.open("a") as file:
        file.write("[2026-01-02 03:04:06,678 E 12 34] (raylet) agent_manager.cc:2: an agent failed\x1b[31m\nmore\n")
        file.write("[2026-01-02 03:04:07,678 I 12 34] (raylet) main.cc:3: the end\n")
    assert last_error(log).startswith("agent_manager.cc:2: an agent failed")
    assert "\x1b" not in last_error(log)


@pytest.fixture
def servers(tmp_path: Path) -> Path:
    """A folder of programs with the names of Ray's."""
    for name in ("gcs_server", "raylet", "agent"):
        shutil.copy(shutil.which("sleep") or "", tmp_path / name)
    return tmp_path


def run_program(folder: Path, victim: str, ending: str, unwinding_s: float = 200.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM + ending, str(folder), victim, str(unwinding_s)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.full
@pytest.mark.parametrize("victim", ["raylet", pytest.param("gcs_server", marks=pytest.mark.slow)])
def test_a_program_that_ends_in_order_leaves_out_rays_end(servers: Path, victim: str) -> None:
    done = run_program(servers, victim, "print(fake.failure, file=sys.stderr); sys.exit(7)")
    assert done.returncode == EXIT_RUN_FAILED, done.stderr
    assert done.stderr.startswith(f"Ray's {victim} (pid ")
    assert done.stderr.endswith(") on this machine has died\n")
    assert done.stdout == "the loggers' end\n"


def test_a_program_that_has_succeeded_before_it_ends(servers: Path) -> None:
    done = run_program(servers, "raylet", "fake.let_die()")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_a_program_that_hangs_is_ended(servers: Path) -> None:
    done = run_program(servers, "raylet", "time.sleep(600)", unwinding_s=0.5)
    assert done.returncode == EXIT_RUN_FAILED, done.stderr
    assert done.stderr.startswith("error: Ray's raylet (pid ")


def test_servers_that_do_not_start_leave_nothing_behind(servers: Path) -> None:
    done = run_program(servers, "at the start", "")
    assert "Ray could not be started on this machine: Ray" in done.stderr
