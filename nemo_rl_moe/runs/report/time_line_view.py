# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Data of a report about asynchronous rollouts: activity of trainer and engines in the last steps."""

from typing import Any

import numpy as np

from nemo_rl_moe.runs.folder.time_line import ENGINE_STATES, TRAINER_STATES, TimeLineHistory
from nemo_rl_moe.runs.report.arrays import ArrayPool

STEPS_SHOWN = 12


def time_line_view(found: TimeLineHistory, pool: ArrayPool) -> dict[str, Any]:
    """Return the data of the time line. `trainer` and `engines` hold the state in each bin (part of a step)."""
    states = found.states[-STEPS_SHOWN:].astype(np.uint8)
    return {
        "steps": found.steps[-STEPS_SHOWN:].tolist(),
        "seconds": found.seconds[-STEPS_SHOWN:].tolist(),
        "num_bins": states.shape[-1],
        "states": {"trainer": TRAINER_STATES, "engines": ENGINE_STATES},
        "trainer": pool.add(states[:, 0].reshape(-1)),
        "engines": pool.add(states[:, 1].reshape(-1)),
    }
