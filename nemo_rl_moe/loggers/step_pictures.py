# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Pictures of a run's steps: when they are due, and drawn once for all backends, in the thread of one of them."""

import threading
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from jaxtyping import Float, Int

from nemo_rl_moe.loggers.advantage_pictures import advantage_pictures
from nemo_rl_moe.loggers.console import Notices, quiet, reason_of
from nemo_rl_moe.loggers.interface import DrawPictures
from nemo_rl_moe.loggers.modality_pictures import modality_pictures
from nemo_rl_moe.loggers.pictures import expert_load_pictures
from nemo_rl_moe.loggers.routing_pictures import routing_pictures


def is_picture_step(step: int, every_steps: int | None) -> bool:
    """True for steps with pictures: the first one and each multiple of `every_steps`; None or 0: never."""
    return bool(every_steps) and (step == 1 or step % (every_steps or 1) == 0)


class StepPictures:
    """Pictures of the steps at which they are due, drawn once for all backends.

    Survives a matplotlib that cannot draw, for example without fonts: it warns once, and metrics go on.

    Args:
        every_steps: See `is_picture_step`.
        notices: Receives the warning.
    """

    def __init__(self, every_steps: int | None, notices: Notices):
        self._every_steps = every_steps
        self._notices = notices
        # Several backends may ask at once; matplotlib is not thread-safe.
        self._lock = threading.Lock()
        self._has_failed = False

    def expert_load(
        self,
        step: int,
        layers: Sequence[int],
        counts: Int[np.ndarray, "layers experts"],
        image_counts: Int[np.ndarray, "layers experts"] | None = None,
        topk: int | None = None,
    ) -> DrawPictures | None:
        """Function that draws the expert load of a step; None where none is due. The counts must not be changed.

        Args:
            step: The step.
            layers: Index of each MoE layer in the whole model.
            counts: Assignments of each expert.
            image_counts: Those of image tokens, which are drawn too; None: of a model of text.
            topk: Experts that each token is routed to; None where that is not known.
        """

        def draw() -> Mapping[str, bytes]:
            of_load = expert_load_pictures(step, layers, counts)
            if image_counts is None:
                return of_load
            return {**of_load, **modality_pictures(step, layers, counts, image_counts, topk)}

        return self._of_step(step, "expert load", draw)

    def routing(self, step: int, layers: Sequence[int], rows: Int[np.ndarray, "layers kinds"]) -> DrawPictures | None:
        """Function that draws the routing of a step; None where none is due.

        Args:
            step: The step.
            layers: Index of each MoE layer in the whole model.
            rows: Rows of the tape by kind, in the order of `Row`; must not be changed.
        """
        return self._of_step(step, "routing", partial(routing_pictures, step, layers, rows))

    def advantages(
        self, step: int, layers: Sequence[int], scores: Float[np.ndarray, "layers experts"]
    ) -> DrawPictures | None:
        """Function that draws the scores of experts by advantage of a step; None where none is due."""
        return self._of_step(step, "experts by advantage", partial(advantage_pictures, step, layers, scores))

    def _of_step(self, step: int, what: str, pictures: DrawPictures) -> DrawPictures | None:
        if not is_picture_step(step, self._every_steps):
            return None
        drawn: Mapping[str, bytes] | None = None

        def draw() -> Mapping[str, bytes]:
            nonlocal drawn
            with self._lock:
                if drawn is None:
                    drawn = self._draw(f"the {what} of step {step}", pictures)
            return drawn

        return draw

    def _draw(self, what: str, pictures: DrawPictures) -> Mapping[str, bytes]:
        try:
            # At its first import, matplotlib logs lines about folders and fonts.
            with quiet("matplotlib"):
                return pictures()
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                self._notices.warn(f"{what} cannot be drawn: {reason_of(error)}; metrics go on")
            return {}
