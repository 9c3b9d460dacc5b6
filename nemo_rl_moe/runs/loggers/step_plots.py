# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Plots of a run's steps. Each plot is made once for all backends, in the thread of one backend."""

import threading
from collections.abc import Mapping

from nemo_rl_moe.runs.loggers.console import Notices, quiet, reason_of
from nemo_rl_moe.runs.loggers.interface import DrawPlots


def is_plot_step(step: int, every_steps: int | None) -> bool:
    """Return whether a step has plots: the first step, and multiples of `every_steps`. No step if it is None or 0."""
    return bool(every_steps) and (step == 1 or step % (every_steps or 1) == 0)


class StepPlots:
    """Makes the plots of steps.

    If matplotlib fails, for example without fonts, there is one warning, and metrics are still logged.
    """

    def __init__(self, every_steps: int | None, notices: Notices):
        self._every_steps = every_steps
        self._notices = notices
        # Several backends may ask at once, and matplotlib is not thread-safe.
        self._lock = threading.Lock()
        self._has_failed = False

    def are_due(self, step: int) -> bool:
        return is_plot_step(step, self._every_steps)

    def of_step(self, step: int, what: str, plots: DrawPlots) -> DrawPlots | None:
        """Return a function that makes the plots of a step at its first call, or None for a step without plots."""
        if not self.are_due(step):
            return None
        drawn: Mapping[str, bytes] | None = None

        def draw() -> Mapping[str, bytes]:
            nonlocal drawn
            with self._lock:
                if drawn is None:
                    drawn = self._draw(f"the {what} of step {step}", plots)
            return drawn

        return draw

    def _draw(self, what: str, plots: DrawPlots) -> Mapping[str, bytes]:
        try:
            # matplotlib logs lines about folders and fonts when it is imported.
            with quiet("matplotlib"):
                return plots()
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                self._notices.warn(f"{what} cannot be drawn: {reason_of(error)}; metrics are still logged")
            return {}
