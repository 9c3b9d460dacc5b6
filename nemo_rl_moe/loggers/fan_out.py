# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Sends every step to all loggers, and keeps the training alive when one of them fails."""

import contextlib
import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from nemo_rl_moe.loggers.interface import MetricLogger


class FanOutLogger:
    """A `MetricLogger` in front of many: a backend that raises warns once, then is left out for good.

    Values go to the backends as they are, NaN and infinities included; each backend's own docstring says what becomes
    of them there.

    Args:
        backends: Name to a function that opens the backend; called at once, in order.
        warn: Shows one line to the user; called at most once for each backend.
    """

    name = "all loggers"

    def __init__(self, backends: Mapping[str, Callable[[], MetricLogger]], warn: Callable[[str], None]):
        self._warn = warn
        self._backends: dict[str, MetricLogger] = {}
        for name, open_backend in backends.items():
            try:
                self._backends[name] = open_backend()
            except Exception as error:
                self._report(name, "could not start", error)

    @property
    def active(self) -> tuple[str, ...]:
        """The names of the backends that still take part."""
        return tuple(self._backends)

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends one step to every backend that still takes part."""
        self._for_each(f"failed at step {step}", lambda backend: backend.log_step(step, metrics))

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Sends the configuration to every backend that still takes part."""
        self._for_each("failed to store the configuration", lambda backend: backend.log_config(config))

    def close(self) -> None:
        """Closes every backend; a second call does nothing."""
        self._for_each("failed to close", lambda backend: backend.close())
        self._backends.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _for_each(self, failure: str, action: Callable[[MetricLogger], None]) -> None:
        for name, backend in list(self._backends.items()):
            try:
                action(backend)
            except Exception as error:
                del self._backends[name]
                self._report(name, failure, error)
                # Frees its files and threads; it has had its warning, so a second failure is of no interest.
                with contextlib.suppress(Exception):
                    backend.close()

    def _report(self, name: str, failure: str, error: Exception) -> None:
        line = f"logger {name} {failure} and is left out from here on: {_reason(error)}"
        try:
            self._warn(line)
        except Exception:
            # The way to the user may itself be what broke, as with a closed pipe behind standard output.
            with contextlib.suppress(Exception):
                print(f"warning: {line}", file=sys.stderr)


def _reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"the package {error.name} is not installed"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
