# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Views of a run's folder: text with findings, a self-contained HTML file, and a terminal view.

This package does not import torch, Ray or Megatron-Core, so that a folder can be copied to a laptop and viewed there.
"""
