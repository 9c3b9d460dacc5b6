# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Output stream that survives the loss of the console, so that a run continues without one."""

import io
import os
import sys
from contextlib import suppress
from typing import TextIO

from nemo_rl_moe.errors import printable


class LastingStream(io.TextIOBase):
    """Stream that never raises.

    Characters that the target cannot encode are escaped. If the target is gone, such as a closed terminal or a pipe
    without a reader, output is dropped, after one warning on standard error.

    Args:
        target: Stream to write to. By default, whatever standard output is at the moment of writing.
    """

    def __init__(self, target: TextIO | None = None):
        super().__init__()
        self._target = target
        self._is_gone = False

    def __del__(self) -> None:
        """Do not flush, unlike the base class, since the target may have been closed by now."""

    @property
    def _output(self) -> TextIO:
        # A live display of rich replaces standard output by a stream that writes to this one.
        found: TextIO = getattr(sys.stdout, "rich_proxied_file", sys.stdout) if self._target is None else self._target
        return found

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._output, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return not self._is_gone and self._output.isatty()

    def fileno(self) -> int:
        return self._output.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        if not self._is_gone:
            try:
                self._output.write(self._encodable(text))
            except (OSError, ValueError) as error:  # ValueError: it is closed
                self._leave(error)
        return len(text)

    def flush(self) -> None:
        if not self._is_gone:
            try:
                self._output.flush()
            except (OSError, ValueError) as error:
                self._leave(error)

    def _encodable(self, text: str) -> str:
        try:
            text.encode(self.encoding)
        except UnicodeEncodeError:
            return text.encode(self.encoding, "backslashreplace").decode(self.encoding)
        return text

    def _leave(self, error: Exception) -> None:
        """Redirect the target to nowhere, so that its buffer does not fail again at the end of the process."""
        self._is_gone = True
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._output.fileno())
            os.close(nowhere)
        with suppress(Exception):
            print(printable(f"warning: the console is gone ({error}); the run continues without it"), file=sys.stderr)
