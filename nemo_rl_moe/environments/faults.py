# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""How many responses an environment has failed on."""

from collections import Counter
from collections.abc import Sequence

from nemo_rl_moe.environments.interface import Fault, Score

METRIC_NAMES = {Fault.ERROR: "env/num_errors", Fault.TIMEOUT: "env/num_timeouts", Fault.DIED: "env/num_died"}


def fault_metrics(scores: Sequence[Score]) -> dict[str, float]:
    """`env/num_errors`, `env/num_timeouts` and `env/num_died`: responses that got reward 0 for want of a score."""
    counts = Counter(score.fault for score in scores)
    return {name: float(counts[fault]) for fault, name in METRIC_NAMES.items()}
