# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""RL post-training of Mixture-of-Experts models whose routing you can see and trust."""

__version__ = "0.2.0"
