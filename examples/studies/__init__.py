# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Shared parts of studies with many runs: the runs, their measures, and intervals over seeds."""
