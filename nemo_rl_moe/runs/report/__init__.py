# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Views of a run's folder: findings in words, one self-contained HTML file, a view for the terminal.

Nothing here imports torch, Ray or Megatron-Core: a folder that was copied to a laptop can be viewed there.
"""
