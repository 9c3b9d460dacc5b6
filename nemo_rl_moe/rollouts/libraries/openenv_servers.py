# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Servers of OpenEnv environments on the loopback interface. A server is replaced if it ends or hangs."""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.masking import is_secret

KEY = "env.driver.server"
START_S = 180.0
"""Seconds that a server may take to start."""
CHECK_S = 10.0
_POLL_S = 0.1
_END_S = 5.0


class OpenEnvServer:
    """A server in a separate process.

    Args:
        app: `package.module:app`, an ASGI app made by the library's `create_app`.
    """

    def __init__(self, app: str):
        self._app = app
        self._lock = threading.Lock()
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (as long as the server)
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def start(self) -> None:
        """Start the server without waiting until it answers."""
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nemo_rl_moe.rollouts.libraries.openenv_server", self._app, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env={name: value for name, value in os.environ.items() if not is_secret(name)},
        )

    def wait(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_S
        while not is_healthy(self.url, 1.0):
            if self._process.poll() is not None:
                raise ConfigurationError(
                    f"{KEY}: {self._app} does not start (exit code {self._process.returncode}){self._said()}"
                )
            if time.monotonic() > deadline:
                raise ConfigurationError(f"{KEY}: {self._app} gave no answer within {START_S:g} s{self._said()}")
            time.sleep(_POLL_S)

    def replace_if_lost(self) -> None:
        """Start another process if this one has ended or does not answer."""
        with self._lock:
            if self._process is None or is_healthy(self.url, CHECK_S):
                return
            self.stop()
            self.start()
            self.wait()

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(_END_S)

    def _said(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        return f"; it said last: {lines[-1]}" if lines else ""


def is_healthy(url: str, limit_s: float) -> bool:
    """Return whether a server answers within a limit in seconds."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=limit_s) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
