# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Where the numbers of a run go: one small class a backend, all behind `MetricLogger`."""
