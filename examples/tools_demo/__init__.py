# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The demo with a tool: a tiny MoE model that cannot multiply learns to call a calculator and to copy its result."""
