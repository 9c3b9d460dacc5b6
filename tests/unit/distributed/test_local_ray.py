# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import signal
import subprocess
import sys

import pytest
import ray

from nemo_rl_moe.distributed.cluster import (
    LARGEST_OBJECT_STORE_BYTES,
    SMALLEST_OBJECT_STORE_BYTES,
    kept_in_its_place,
    object_store_bytes,
)

WORKER = """
import os, signal, subprocess, sys
from nemo_rl_moe.distributed.worker_process import _outlive_requests_to_stop
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
_outlive_requests_to_stop()
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


def test_the_object_store_is_small() -> None:
    assert SMALLEST_OBJECT_STORE_BYTES <= object_store_bytes() <= LARGEST_OBJECT_STORE_BYTES


def test_ray_takes_over_neither_signals_nor_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray._private.worker, "print_to_stdstream", ray._private.worker.print_to_stdstream)
    former = signal.getsignal(signal.SIGTERM)
    with kept_in_its_place():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) == former
    ray._private.worker.print_to_stdstream({"lines": ["a page"], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    assert capsys.readouterr() == ("", "")


def test_a_worker_outlives_sigterm_and_what_it_starts_does_not() -> None:
    done = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{-signal.SIGTERM} {-signal.SIGTERM}\n", done.stderr
