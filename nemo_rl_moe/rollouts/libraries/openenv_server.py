# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The process of an OpenEnv server. It listens on the loopback interface and ends with the run."""

import os
import sys
import threading
from pathlib import Path

ENDED = 70


def main(app: str, port: int) -> None:  # pragma: no cover  (runs in another process)
    """Serve `app` (`package.module:app`) until the standard input ends."""
    import uvicorn

    threading.Thread(target=_end_with_the_run, daemon=True).start()
    sys.path.append(str(Path.cwd()))
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


def _end_with_the_run() -> None:  # pragma: no cover
    # The run holds the other end of the pipe. Reading `sys.stdin` would hold a lock that the interpreter needs to exit.
    while os.read(0, 1):
        pass
    os._exit(ENDED)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
