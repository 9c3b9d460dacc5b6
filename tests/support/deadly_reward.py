# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A reward that costs a run its vLLM engine, once."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil

from nemo_rl_moe.rewards.interface import ScoringItem

MARK = "MARK_OF_THE_KILLED_ENGINE"
"""Variable of a run whose engine is to be killed: a file that says that it has been."""
ENGINE_TITLE = "ray::VllmWorker"


def share_of_digits(item: ScoringItem) -> float:
    """Return how many of twelve characters are digits; where a run has the mark, the first response kills its
    engine.
    """
    mark = os.environ.get(MARK)
    if mark and not Path(mark).exists():
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                if "".join(process.cmdline()[:1]).startswith(ENGINE_TITLE) and process.environ().get(MARK) == mark:
                    os.kill(process.pid, signal.SIGKILL)
                    Path(mark).touch()
    return sum(character.isdigit() for character in item.response) / 12
