# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Ray workers that are forked from a process which has imported torch and Megatron-Core.

A rank's process spends three of its four seconds on imports; tests of what runs compute start over a hundred of them.
Ray starts `python forked_workers.py SOCKET default_worker.py ...` in place of Python: that asks the server behind the
socket for a fork that takes its arguments, environment, working folder and standard streams, and ends when that ends.

What workers say to each other is recorded, and must be what NCCL would carry: `nccl_rules`.
"""

import contextlib
import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

_STANDARD_STREAMS = (0, 1, 2)


class WorkerServer:
    """The process from which workers are forked."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="forked_workers_")
        self._path = str(Path(self._folder, "socket"))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def python(self) -> str:
        """Command that Ray is to use as Python: its `py_executable`."""
        return f"{sys.executable} -S {__file__} {self._path}"

    def problems(self) -> list[str]:
        """Return what NCCL would not have carried of what workers have said since the last call."""
        from tests.support.rank_state import take_problems

        return take_problems(Path(self._folder))

    def start(self) -> None:
        """Start it, with this process's environment; returns when it has imported everything."""
        command = [sys.executable, "-c", f"from {__name__} import serve; serve({self._path!r})"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout
        assert self._process.stdout.readline() == b"ready\n", "the server of workers did not start"

    def end(self) -> None:
        """End it; workers that it has forked are Ray's to end."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        shutil.rmtree(self._folder)


def serve(path: str) -> None:  # pragma: no cover  (runs in another process)
    """Import what a rank imports, then forks one for each request, until standard input ends."""
    import gc
    import selectors
    import signal

    import torch

    import nemo_rl_moe.models.megatron.model.agreement
    import nemo_rl_moe.models.megatron.training.trainer  # noqa: F401
    from tests.support.nccl_rules import record_into

    # Threads do not survive a fork.
    torch.set_num_threads(1)
    # Ray reads the environment when it is imported, which is another one in each worker.
    assert "ray" not in sys.modules
    # What is here stays; a collection in a fork would touch, and so copy, all of it.
    gc.collect()
    gc.freeze()
    # Nobody waits for the forks: the kernel collects them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    os.write(1, b"ready\n")
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    while 0 not in {key.fd for key, _ in selector.select()}:
        client, _ = listener.accept()
        request, streams, _, _ = socket.recv_fds(client, 1 << 20, len(_STANDARD_STREAMS))
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            selector.close()
            listener.close()
            record_into(Path(path).parent)
            _become(json.loads(request), streams)
        for stream in streams:
            os.close(stream)
        client.close()


def _become(request: dict[str, object], streams: list[int]) -> None:  # pragma: no cover  (runs in another process)
    """Run the requested script as `python script arguments` would; never returns.

    The connection stays open for as long as this process lives, which is how the one who asked knows.
    """
    code = 1
    try:
        for stream, number in zip(streams, _STANDARD_STREAMS, strict=True):
            os.dup2(stream, number)
            os.close(stream)
        os.environ.clear()
        os.environ.update(request["environment"])  # type: ignore[call-overload]
        os.chdir(str(request["folder"]))
        sys.argv = list(request["arguments"])  # type: ignore[call-overload]
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _ask(path: str, arguments: list[str]) -> None:  # pragma: no cover  (runs in another process)
    """Ask for a fork, and waits until it has ended."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        request = {"arguments": arguments, "environment": dict(os.environ), "folder": str(Path.cwd())}
        socket.send_fds(connection, [json.dumps(request).encode()], _STANDARD_STREAMS)
        connection.recv(1)


if __name__ == "__main__":
    _ask(sys.argv[1], sys.argv[2:])
