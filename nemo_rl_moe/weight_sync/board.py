# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Boards, on which the processes of a weight transfer leave short notes: a folder, or a store in the driver.

A folder in shared memory is for one machine, and for transfers through files. Between machines, a folder would be on a
network file system, whose directory listings are often seconds old.
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

FAILED = "failed"
"""The note why the transfer ended early."""
_ANSWER_S = 30.0
"""Seconds after which a driver that does not answer counts as dead."""


class Board(Protocol):
    """Short notes by name. A board is pickled to the processes that share it.

    All methods raise a WeightSyncError after the end of the transfer.
    """

    def names(self) -> set[str]: ...

    def read(self, name: str) -> str: ...

    def put(self, name: str, text: str) -> None:
        """Leave a note, which appears atomically."""
        ...

    def put_first(self, name: str, text: str) -> bool:
        """Leave a note unless a note of this name exists; return whether this note was left."""
        ...

    def remove(self, names: Iterable[str]) -> None: ...

    def own_address(self) -> str:
        """Return this process's address for the other processes."""
        ...


class EndedByOtherError(WeightSyncError):
    """Another process has ended the transfer. The text contains the reason."""


def names_of(board: Board) -> set[str]:
    """Return the names of the notes.

    Raises:
        EndedByOtherError: The transfer has failed.
    """
    names = board.names()
    if FAILED in names:
        raise EndedByOtherError(board.read(FAILED))
    return names


@dataclass(frozen=True)
class FolderBoard:
    """A board in a folder. Its files are notes, or contain tensors."""

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
        """Write a file atomically."""
        staging = self.folder / f"{name}.incomplete"
        try:
            write(staging)
            staging.rename(self.folder / name)
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(f"{self.folder}: cannot write {name}: {error}") from error

    def put_first(self, name: str, text: str) -> bool:
        try:
            with tempfile.NamedTemporaryFile("w", dir=self.folder, encoding="utf-8") as file:
                file.write(text)
                file.flush()
                link(file.name, self.folder / name)
        except FileExistsError:
            return False
        except OSError as error:
            raise WeightSyncError(f"{self.folder}: cannot write {name}: {error}") from error
        return True

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def own_address(self) -> str:
        return "127.0.0.1"


@dataclass(frozen=True)
class NetworkBoard:
    """A board in a key-value store (`TCPStore`), which the driver serves while the transfer is open."""

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
    """Serve a store for `size` processes (None: any number) on one address only, and return it.

    torch's default listens on all interfaces, without credentials.
    """
    family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(place[:2], family=family)
    port = listener.getsockname()[1]
    # The store takes over the socket and closes it.
    return TCPStore(
        host,
        port,
        size,
        is_master=True,
        timeout=timedelta(seconds=_ANSWER_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
