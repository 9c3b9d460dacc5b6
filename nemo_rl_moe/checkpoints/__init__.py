# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on the driver's side: saving, folders, the best ones, and resuming."""
