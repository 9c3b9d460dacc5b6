# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What an environment worker does with its share of a batch."""

import faulthandler
import math
import time
from collections.abc import Sequence

from nemo_rl_moe.config.schema_grpo import EnvironmentConfig
from nemo_rl_moe.environments.interface import Score, ScoringItem
from nemo_rl_moe.environments.registry import make_scorer
from nemo_rl_moe.environments.time_limit import score_within

INTERRUPTION_S = 1.0
"""What a response has left after the alarm: an environment that has not stopped then ends with its process."""
REARMING_S = 1.0
"""How much later that may be. To arm the end anew takes longer than many an environment takes for a response."""
LONGEST_HOLD_S = INTERRUPTION_S + REARMING_S
"""The most by which a response exceeds its time."""
STDERR = 2


class EnvironmentWorker:  # pragma: no cover  (runs in other processes)
    """Keeps an environment and scores one response after the other.

    Args:
        rank: Number of the worker.
        world_size: Number of workers.
        config: The environment.
    """

    def __init__(self, rank: int, world_size: int, *, config: EnvironmentConfig):
        self._environment = make_scorer(config)
        self._timeout_s = config.timeout_s

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        """One score for each response, in their order.

        What runs outside of the interpreter, such as a loop in C, does not see an alarm before it comes back. A thread
        of faulthandler's, which needs no interpreter lock, then writes the stack to stderr and ends the process, which
        the driver sees.
        """
        armed_at = -math.inf
        scores = []
        try:
            for item in items:
                if (now := time.monotonic()) - armed_at > REARMING_S:
                    faulthandler.dump_traceback_later(self._timeout_s + LONGEST_HOLD_S, exit=True, file=STDERR)
                    armed_at = now
                scores.append(score_within(self._timeout_s, self._environment, item))
        finally:
            faulthandler.cancel_dump_traceback_later()
        return scores
