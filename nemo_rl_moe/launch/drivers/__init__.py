# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Drivers of trajectories, one kind in each file: checked before any worker starts, then started with its workers."""
