# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Observation of routes with torch and numpy alone: metrics, replay, agreement of rollout and training, findings.

`audit` and `hooks` serve other training loops. They also read and write files, and import nothing of training.
"""
