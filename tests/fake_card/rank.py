# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A process that calls functions as a rank with a fake card, for `ranks`: python -m tests.fake_card.rank DESCRIPTOR."""

import ctypes
import faulthandler
import gc
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_ROOT = f"{Path(__file__).resolve().parents[2]}/"
_DECORATORS = ("/typing_extensions.py", "/contextlib.py", "/functools.py")
_METHODS = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter", "barrier", "send", "recv"),
    *("allgather", "_allgather_base", "allgather_into_tensor_coalesced", "all_gather_single"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "reduce_scatter_single"),
    *("alltoall", "alltoall_base", "all_to_all_single"),
)
"""Methods of `ProcessGroup` by which all collectives and messages pass."""


def name_call_sites() -> None:
    """Tells the fake NCCL from which line of Python each call comes."""
    from torch.distributed import ProcessGroup

    tell = ctypes.CDLL("libnccl.so.2").fake_card_call_site

    def telling(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def told(*arguments: Any, **named: Any) -> Any:
            tell(call_site().encode())
            return method(*arguments, **named)

        return told

    for name in _METHODS:
        if hasattr(ProcessGroup, name):
            setattr(ProcessGroup, name, telling(getattr(ProcessGroup, name)))


def call_site() -> str:
    """Return the first line outside of torch that has led here, and the first of this repository."""
    places = []
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        own = file.startswith(_ROOT) and "/site-packages/" not in file
        passing = file == __file__ or "/site-packages/torch/" in file or file.endswith(_DECORATORS)
        if not passing and (own or not places):
            short = file.removeprefix(_ROOT).rpartition("site-packages/")[2]
            places.append(f"{short}:{frame.f_lineno}")
            if own:
                break
        frame = frame.f_back
    return " from ".join(places)


def _clean_up() -> None:
    """Let nothing of a call stay on the card."""
    import torch

    from tests.support import rank_state

    rank_state._kept.clear()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def serve(connection: Connection) -> None:
    """Call functions, one after the other, and send what each returned or raised."""
    name_call_sites()
    while True:
        try:
            module, function, environment, arguments = connection.recv()
        except EOFError:
            return
        os.environ.update(environment)
        try:
            connection.send((True, getattr(importlib.import_module(module), function)(*arguments)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
            return
        _clean_up()


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    serve(Connection(int(sys.argv[1])))
    sys.stdout.flush()
    os._exit(0)  # nothing is worth waiting for peers that still need this rank
