# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Which run a driver process works for, and which of the run's attempts it is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RunAttempt:
    """One driver process of a run.

    Attributes:
        run_id: Names the command that the user started; the same in all attempts of it.
        number: Counts from 1; more than 1 after a restart.
        started: When the command was started, on the machine's monotonic clock; None: with this process.
    """

    run_id: str
    number: int
    started: float | None = None
