# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The reward of drills: varies from response to response, takes a moment, and its process says which one it is."""

import os
import time
from pathlib import Path

from nemo_rl_moe.rewards.interface import ScoringItem

NOTES = "DRILL_REWARD_WORKERS"
"""Environment variable with the folder in which each process that scores leaves its id."""
SECONDS_A_RESPONSE = 0.01
NUM_REWARDS = 8

if NOTES in os.environ:
    Path(os.environ[NOTES], str(os.getpid())).touch()


def grade(item: ScoringItem) -> float:
    """Return a reward between 0 and 1 that depends on all characters of the response and on nothing else."""
    time.sleep(SECONDS_A_RESPONSE)
    return sum(map(ord, item.response)) % NUM_REWARDS / (NUM_REWARDS - 1)
