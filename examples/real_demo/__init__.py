# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The demo with a released model: `python -m examples.real_demo`; in `experts.py`, which words go to which experts."""
