# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Where a training loop stands between two steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LoopState:
    """What a loop needs, beside the policy's own state, to go on as if it had never stopped.

    Attributes:
        step: Steps done.
        batches_taken: Global batches, or rounds of prompts, that have been taken from the data.
        first_validation: Metrics of the first validation, for the summary; empty before it.
        last_validation: Those of the last one.
        last_training: Metrics of the last step.
        skipped_in_a_row: Updates up to here that were skipped, none between them done.
    """

    step: int = 0
    batches_taken: int = 0
    first_validation: Mapping[str, float] = field(default_factory=dict)
    last_validation: Mapping[str, float] = field(default_factory=dict)
    last_training: Mapping[str, float] = field(default_factory=dict)
    skipped_in_a_row: int = 0
