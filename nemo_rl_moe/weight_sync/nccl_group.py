# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""NCCL between a trainer and engines that may die: a dead engine costs a transfer, not the trainer.

NCCL waits for a dead process for ever, or reports an error to torch's watchdog, which ends the trainer. So these groups
have no watchdog, and whoever waits looks at the board of the transfer meanwhile: the driver notes the death there.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from nemo_rl_moe.errors import WeightSyncError
from nemo_rl_moe.weight_sync.board import Board, names_of

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.05
_BOARD_PERIOD_S = 0.5
_NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"


def make_nccl_group(board: Board, store: TCPStore, rank: int, size: int, timeout_s: float) -> Any:
    """Return the group of all processes that meet in the store.

    Raises:
        WeightSyncError: One of them does not come, or the transfer has ended.
    """
    from torch.distributed import ProcessGroupNCCL

    store.set(_present(rank), "")
    everyone = [_present(each) for each in range(size)]
    # NCCL itself would wait without a limit.
    _wait_until(lambda: store.check(everyone), board, timeout_s, f"all {size} processes of a connection")
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    with _variable(_NO_WATCHDOG, "1"):
        return ProcessGroupNCCL(store, rank, size, options)


def wait_for(work: Any, group: Any, board: Board, timeout_s: float) -> None:
    """Wait until an operation of a group is done. If it fails, abort the group, so that the device goes on.

    Raises:
        RuntimeError: NCCL has reported an error.
        WeightSyncError: The transfer has ended, or the operation takes too long.
    """
    try:
        _wait_until(work.is_completed, board, timeout_s, "NCCL")
        work.wait()  # raises its error
    except BaseException:
        group.abort()
        raise


def _wait_until(is_done: Callable[[], bool], board: Board, timeout_s: float, what: str) -> None:
    began = looked = time.monotonic()
    pause = _SHORTEST_PAUSE_S
    while not is_done():
        now = time.monotonic()
        if now - began > timeout_s:
            raise WeightSyncError(f"waited for {timeout_s:g} s for {what}")
        if now - looked > _BOARD_PERIOD_S:
            names_of(board)
            looked = now
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _present(rank: int) -> str:
    return f"present-{rank}"


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """A frame in which an environment variable has a value."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
