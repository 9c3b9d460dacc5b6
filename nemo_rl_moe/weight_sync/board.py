# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A place where the processes of one transfer of weights leave short notes: a folder, or a store of the driver.

A folder of shared memory serves one machine, and a transfer whose tensors are files. Between machines a folder would
be on a network's file system, whose directories are often seconds old.
"""

import socket
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from os import link
from pathlib import Path
from typing import Protocol, TypeVar

from safetensors import SafetensorError
from torch.distributed import DistError, TCPStore

from nemo_rl_moe.errors import WeightSyncError

Answer = TypeVar("Answer")

_ANSWER_S = 30.0
"""Until a driver that does not answer is taken for dead."""


class Board(Protocol):
    """Notes by name, in a form that is pickled to the processes that share them.

    Raises:
        WeightSyncError: It is gone: the transfer has ended.
    """

    def names(self) -> set[str]: ...

    def read(self, name: str) -> str: ...

    def put(self, name: str, text: str) -> None:
        """Leave a note, which appears complete."""
        ...

    def put_first(self, name: str, text: str) -> bool:
        """Leave a note unless there is one; return whether it is there now."""
        ...

    def remove(self, names: Iterable[str]) -> None: ...

    def own_address(self) -> str:
        """Return the address under which the others reach this process."""
        ...


@dataclass(frozen=True)
class FolderBoard:
    """Files of a folder, which are notes or whole tensors."""

    folder: Path

    def names(self) -> set[str]:
        try:
            return {path.name for path in self.folder.iterdir()}
        except OSError as error:
            raise WeightSyncError(f"the folder of the transfer cannot be read: {error}") from error

    def read(self, name: str) -> str:
        try:
            return (self.folder / name).read_text(encoding="utf-8")
        except OSError as error:
            raise WeightSyncError(f"the folder of the transfer cannot be read: {error}") from error

    def put(self, name: str, text: str) -> None:
        self.put_file(name, lambda path: path.write_text(text, encoding="utf-8"))

    def put_file(self, name: str, write: Callable[[Path], object]) -> None:
        """Write a file that appears complete or not at all."""
        staging = self.folder / f"{name}.incomplete"
        try:
            write(staging)
            staging.rename(self.folder / name)
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(f"{self.folder} did not take {name}: {error}") from error

    def put_first(self, name: str, text: str) -> bool:
        try:
            with tempfile.NamedTemporaryFile("w", dir=self.folder, encoding="utf-8") as file:
                file.write(text)
                file.flush()
                link(file.name, self.folder / name)
        except FileExistsError:
            return False
        except OSError as error:
            raise WeightSyncError(f"{self.folder} did not take {name}: {error}") from error
        return True

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def own_address(self) -> str:
        return "127.0.0.1"


@dataclass(frozen=True)
class NetworkBoard:
    """Notes in a store that the driver serves as long as the transfer is open."""

    host: str
    port: int

    def names(self) -> set[str]:
        return set(self._ask(lambda store: store.list_keys()))

    def read(self, name: str) -> str:
        return self._ask(lambda store: store.get(name)).decode()

    def put(self, name: str, text: str) -> None:
        self._ask(lambda store: store.set(name, text))

    def put_first(self, name: str, text: str) -> bool:
        return self._ask(lambda store: store.compare_set(name, "", text)).decode() == text

    def remove(self, names: Iterable[str]) -> None:
        def delete(store: TCPStore) -> None:
            for name in names:
                store.delete_key(name)

        self._ask(delete)

    def own_address(self) -> str:
        family, kind, _, _, place = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])

    def _ask(self, question: Callable[[TCPStore], Answer]) -> Answer:
        try:
            return question(_client(self.host, self.port))
        except (DistError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise WeightSyncError(
                f"the notes of the transfer at {self.host}:{self.port} cannot be read: {reason}"
            ) from error


@lru_cache(maxsize=1)
def _client(host: str, port: int) -> TCPStore:
    return TCPStore(host, port, None, is_master=False, timeout=timedelta(seconds=_ANSWER_S))


def serve_store(host: str, size: int | None = None) -> TCPStore:
    """Serve a store on one address alone: torch's own listens on all interfaces, without credentials.

    Args:
        size: Processes that a group of it has; None: any.
    """
    family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(place[:2], family=family)
    port = listener.getsockname()[1]
    # The store takes the socket over, and closes it in the end.
    return TCPStore(
        host,
        port,
        size,
        is_master=True,
        timeout=timedelta(seconds=_ANSWER_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
