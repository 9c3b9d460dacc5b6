# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Drivers of trajectories, one kind in each file. A driver is checked before any worker starts, and then started with
its workers."""
