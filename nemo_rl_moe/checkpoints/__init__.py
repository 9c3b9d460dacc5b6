# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as the driver sees them: folders, which of them to keep, and from which one a run goes on."""
