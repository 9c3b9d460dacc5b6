# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Notices within a second that Ray's servers have died, which Ray itself tells after a minute or not at all."""

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Protocol

import psutil

from nemo_rl_moe.distributed.node_tools import ProcessIdentity, end_processes, find_families
from nemo_rl_moe.errors import EXIT_FAILURE_TOLD

LOCAL_SERVERS = ("gcs_server", "raylet")
LOOK_PERIOD_S = 0.1
KNOCK_PERIOD_S = 2.0
KNOCK_TIMEOUT_S = 5.0
SILENCE_S = 10.0
"""How long the head of a cluster may leave connections unanswered."""
UNWINDING_S = 6.0
"""What the program has to end in order once the servers have died: calls to Ray that wait for them may never return."""


class Head(Protocol):
    """Ray's servers, as the watch sees them."""

    period_s: float

    def problem(self) -> str | None:
        """What has happened to them; None: nothing."""

    def bury(self) -> None:
        """Ends what is left of them."""


class LocalHead:
    """The servers of a local Ray, which are children of this process.

    Args:
        others: Children that this process has had before Ray was started.
    """

    period_s = LOOK_PERIOD_S

    def __init__(self, others: Collection[ProcessIdentity]):
        self._others = others
        self._servers: dict[str, ProcessIdentity] = {}
        self._started: list[ProcessIdentity] | None = None

    def note_all_started(self) -> None:
        """Tells that Ray has started all that it starts; children that come later, a logger's service say, are not
        Ray's."""
        self._started = self._children()

    def problem(self) -> str | None:
        """What has happened to them; None: nothing, or they are still being started."""
        if len(self._servers) < len(LOCAL_SERVERS):
            self._servers |= _named_children(LOCAL_SERVERS, self._others)
        for name, identity in self._servers.items():
            if identity.find() is None:
                return f"Ray's {name} (pid {identity.pid}) on this machine has died"
        return None

    def bury(self) -> None:
        """Kills the other servers, and the workers that still hang on to them."""
        end_processes(self.family(), grace_s=0.0)

    def family(self) -> list[ProcessIdentity]:
        """The servers that run, and all that they have started."""
        return find_families(self._children() if self._started is None else self._started)

    def _children(self) -> list[ProcessIdentity]:
        children = [ProcessIdentity.of(child) for child in psutil.Process().children()]
        return [child for child in children if child not in self._others]


class RemoteHead:
    """The head of a cluster that this process has joined.

    Args:
        address: "host:port" of its global control store.
    """

    period_s = KNOCK_PERIOD_S

    def __init__(self, address: str):
        self._address = address
        self._answered_at = time.monotonic()

    def problem(self) -> str | None:
        """What has happened to it; None: nothing, or not for long enough to be sure."""
        try:
            knock(self._address, KNOCK_TIMEOUT_S)
        except OSError:
            if (silence_s := time.monotonic() - self._answered_at) > SILENCE_S:
                return f"the head of the Ray cluster at {self._address} has not answered for {silence_s:.0f} s"
        else:
            self._answered_at = time.monotonic()
        return None

    def bury(self) -> None:
        """Does nothing: the cluster is somebody else's."""


class HeadWatch:
    """A thread that looks after Ray's servers; the program asks for `failure` while it waits for workers.

    When the servers have died and the program is still there a few seconds later, the thread ends it and tells why.

    Args:
        head: The servers.
    """

    def __init__(self, head: Head):
        self._head = head
        self._failure: str | None = None
        self._stopped = threading.Event()
        # What was registered later, such as the ends of loggers, comes before it. Ray's own end would come after it,
        # and wait for the servers or crash.
        atexit.register(self._leave_out_ray)
        self._thread = threading.Thread(target=self._run, name="watch over Ray", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """What has happened to the servers; None: nothing. Afterwards, calls to Ray may never return."""
        return self._failure

    def stop(self) -> None:
        """Ends the watch before the servers are ended on purpose; one that has found them dead goes on."""
        if self._failure is None:
            self._stopped.set()
            self._thread.join(KNOCK_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stopped.is_set():
            problem = self._head.problem()
            if self._stopped.is_set():
                return
            if problem is not None:
                self._failure = problem
                with suppress(psutil.Error):
                    self._head.bury()
                time.sleep(UNWINDING_S)
                self._end_program()
            self._stopped.wait(self._head.period_s)

    def _leave_out_ray(self) -> None:
        if self._failure is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(EXIT_FAILURE_TOLD)

    def _end_program(self) -> None:
        print(f"error: {self._failure}", file=sys.stderr, flush=True)
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(EXIT_FAILURE_TOLD)


def knock(address: str, timeout_s: float) -> None:
    """Raises OSError or ValueError when nobody listens at "host:port"."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit():
        raise ValueError("expected host:port or auto")
    socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()


def _named_children(names: Iterable[str], others: Collection[ProcessIdentity]) -> Mapping[str, ProcessIdentity]:
    found = {}
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.name() in names and (identity := ProcessIdentity.of(child)) not in others:
                found[child.name()] = identity
    return found
