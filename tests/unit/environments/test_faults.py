# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Faults as metrics."""

from nemo_rl_moe.environments.interface import Fault, fault_metrics


def test_counts_by_hand():
    faults = [None, Fault.ERROR, Fault.TIMEOUT, Fault.ERROR, None, Fault.DIED, Fault.ERROR]
    metrics = fault_metrics(faults)
    assert metrics == {"env/num_errors": 3.0, "env/num_timeouts": 1.0, "env/num_died": 1.0}
    assert all(isinstance(value, float) for value in metrics.values())


def test_no_fault_is_zero_and_not_missing():
    assert fault_metrics([]) == {"env/num_errors": 0.0, "env/num_timeouts": 0.0, "env/num_died": 0.0}
