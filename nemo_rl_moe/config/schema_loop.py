# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What the sections of supervised algorithms say about their loop."""

from nemo_rl_moe.config.schema_base import NonNegativeInt, PositiveInt, StrictModel


class SupervisedLoopConfig(StrictModel):
    """How long a loop over samples runs, and when it validates."""

    max_num_epochs: PositiveInt
    """Passes over the training samples after which the run ends."""
    max_num_steps: PositiveInt | None
    """Optimizer steps after which the run ends, if that comes first; null: epochs alone decide."""
    val_period: NonNegativeInt
    """Validate each time this many steps are done; 0: never."""
    val_batches: PositiveInt | None
    """Global batches of one validation; null: all held-out samples."""
    val_at_start: bool
    """Validate before the first step."""
    val_at_end: bool
    """Validate after the last step."""
    seed: NonNegativeInt
    """Seed of the order of the samples and of dropout."""
