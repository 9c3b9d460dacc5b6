# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A watch over the receivers of a weight transfer, to end it within seconds if a receiver dies or freezes.

The other processes cannot distinguish a lost receiver from a slow one, and would wait for two minutes. The driver has
started the receivers and can distinguish them: it checks them while the trainer's ranks send.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Protocol

from nemo_rl_moe.errors import ReceiverLostError, WeightSyncError
from nemo_rl_moe.weight_sync.transport import WeightTransport

PERIOD_S = 0.5
"""Seconds between two checks. Most refits end before the first check."""
CAUSE_WAIT_S = 3.0
"""Seconds to wait for the cause of a failure: a receiver's connection often closes before its death is reported."""
_POLL_S = 0.05


class Receivers(Protocol):
    def find_lost(self, patience_s: float | None = None) -> str | None:
        """Return the name of a lost receiver and what happened to it, in words; None if all are alive.

        A frozen receiver is killed, so that processes connected to it notice.
        """
        ...

    def have_ended(self) -> bool:
        """Return whether all receiving calls have ended."""
        ...


@contextmanager
def watched(transport: WeightTransport, receivers: Receivers) -> Iterator[None]:
    """Watch the receivers inside the context; end the transfer with a ReceiverLostError if one is lost."""
    is_over = Event()
    found: list[str] = []

    def look() -> None:
        while not is_over.wait(PERIOD_S):
            if (lost := receivers.find_lost()) is not None:
                found.append(lost)
                transport.abort(lost)
                return

    thread = Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    except WeightSyncError as error:
        is_over.set()
        thread.join(CAUSE_WAIT_S)
        lost = found[0] if found else None if thread.is_alive() else _lost_behind_a_failure(receivers)
        if lost is None:
            raise
        raise ReceiverLostError(lost) from error
    finally:
        is_over.set()


def _lost_behind_a_failure(receivers: Receivers) -> str | None:
    """Return the lost receiver that made a transfer fail, or None. Wait some seconds until a loss can be detected."""
    deadline = time.monotonic() + 2 * CAUSE_WAIT_S
    while True:
        if (lost := receivers.find_lost(CAUSE_WAIT_S)) is not None:
            return lost
        if receivers.have_ended() or time.monotonic() > deadline:
            return None
        time.sleep(_POLL_S)
