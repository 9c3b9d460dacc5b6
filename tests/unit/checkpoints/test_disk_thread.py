# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Work beside the training: in its order, with its errors, and never in the way of an end."""

import subprocess
import sys
import threading
from concurrent.futures import CancelledError

import pytest

from nemo_rl_moe.checkpoints.checkpointer import DiskThread


def test_one_after_the_other_and_errors_come_back() -> None:
    thread = DiskThread()
    done: list[int] = []
    futures = [thread.submit(done.append, number) for number in range(5)]
    failed = thread.submit(int, "x")
    assert [future.result() for future in futures] == [None] * 5
    assert done == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="invalid literal"):
        failed.result()
    assert thread.close(5)
    assert thread.close(5)
    with pytest.raises(CancelledError):
        thread.submit(int).result()


def test_closing_is_bounded_and_drops_what_has_not_begun() -> None:
    thread, may_end, begun = DiskThread(), threading.Event(), threading.Event()
    done: list[int] = []

    def wait() -> None:
        begun.set()
        may_end.wait(60)

    thread.submit(wait)
    later = thread.submit(done.append, 1)
    begun.wait(60)
    assert not thread.close(0.05)
    may_end.set()
    assert thread.close(60)
    assert later.cancelled()
    assert done == []


def test_it_does_not_hold_up_the_end_of_a_program() -> None:
    code = (
        "import time; from nemo_rl_moe.checkpoints.checkpointer import DiskThread\n"
        "DiskThread().submit(time.sleep, 600); time.sleep(0.1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
