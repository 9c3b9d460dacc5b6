# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on the driver's side: their folders, the best ones, and the one that a run resumes from."""
