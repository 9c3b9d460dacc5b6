# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Pictures of the expert load on their way to the backends: drawn once for all, and never by the training loop."""

import threading
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int

from nemo_rl_moe.loggers.interface import Backend, DrawPictures
from nemo_rl_moe.loggers.notices import Notices, quiet, reason_of

_FAILURES_BEFORE_PICTURES_END = 3


def is_picture_step(step: int, every_steps: int | None) -> bool:
    """Whether a step gets pictures: each so many, and the first one; None or 0: never."""
    if not every_steps:
        return False
    return step == 1 or step % every_steps == 0


class LoadPictures:
    """Says which steps get pictures, and draws them when a backend asks first.

    Args:
        every_steps: Each so many steps, and at the first one; None or 0: never.
        notices: Told once when drawing fails.
    """

    def __init__(self, every_steps: int | None, notices: Notices):
        self._every_steps = every_steps
        self._notices = notices
        # Several backends may ask at once; matplotlib draws in one thread at a time.
        self._lock = threading.Lock()
        self._has_failed = False

    def of_step(
        self, step: int, layers: Sequence[int], counts: Int[np.ndarray, "layers experts"]
    ) -> DrawPictures | None:
        """The pictures of a step, not drawn yet; None where none are due. The counts are not to be changed."""
        if not is_picture_step(step, self._every_steps):
            return None
        drawn: dict[str, bytes] | None = None

        def draw() -> Mapping[str, bytes]:
            nonlocal drawn
            with self._lock:
                if drawn is None:
                    drawn = self._draw(step, layers, counts)
            return drawn

        return draw

    def _draw(self, step: int, layers: Sequence[int], counts: Int[np.ndarray, "layers experts"]) -> dict[str, bytes]:
        try:
            # At the first import, matplotlib tells of folders and of fonts that it looks for.
            with quiet("matplotlib"):
                from nemo_rl_moe.loggers.pictures import expert_load_pictures

                return expert_load_pictures(step, layers, counts)
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                self._notices.warn(f"the expert load of step {step} cannot be drawn: {reason_of(error)}; metrics go on")
            return {}


class PictureSender:
    """Hands pictures to one backend; one that does not take them goes on with its metrics.

    Args:
        name: What warnings call the backend.
        notices: Told once when it does not take them.
    """

    def __init__(self, name: str, notices: Notices):
        self._name, self._notices = name, notices
        self._has_warned = False
        self._failures_in_a_row = 0

    def send(self, backend: Backend, step: int, draw: DrawPictures) -> None:
        """Draws and sends the pictures of a step."""
        if self._failures_in_a_row >= _FAILURES_BEFORE_PICTURES_END:
            return
        pictures = draw()
        if not pictures:
            return
        try:
            backend.log_pictures(step, pictures)
        except Exception as error:
            self._failures_in_a_row += 1
            if not self._has_warned:
                self._has_warned = True
                self._notices.warn(
                    f"logger {self._name} does not take the pictures of step {step}: {reason_of(error)}; its metrics "
                    "go on"
                )
        else:
            self._failures_in_a_row = 0
