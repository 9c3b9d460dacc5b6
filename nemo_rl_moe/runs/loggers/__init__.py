# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Loggers of metrics, one class per backend, with the interface `MetricLogger`."""
