# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Who holds how much of a card: reads the ledger that the processes of a job share (libraries/ledger.cpp)."""

import struct
import threading
from pathlib import Path
from types import TracebackType

_NUM_PROCESSES, _NUM_CARDS = 64, 16
_SHARE = struct.Struct(f"i4x{_NUM_CARDS}q")
_PERIOD_S = 0.02


def shares(folder: Path, card: int = 0) -> dict[int, int]:
    """Return the bytes of each process on a card, by process id."""
    try:
        data = (folder / "ledger").read_bytes()
    except FileNotFoundError:
        return {}
    found = [_SHARE.unpack_from(data, number * _SHARE.size) for number in range(_NUM_PROCESSES)]
    return {process: held[card] for process, *held in found if process}


class LedgerHistory:
    """Notes every state of the first card's ledger while it is open.

    Attributes:
        states: Bytes of each process, in order, each different from the one before.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._is_over = folder, threading.Event()
        self.states: list[dict[int, int]] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "LedgerHistory":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(_PERIOD_S):
            found = shares(self._folder)
            if not self.states or found != self.states[-1]:
                self.states.append(found)
