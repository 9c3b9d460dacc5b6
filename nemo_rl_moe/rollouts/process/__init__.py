# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A separate process for users' code of rollouts, whose requests the run answers."""
