# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Observation of routes: metrics, replay, agreement of rollout and training, findings; torch and numpy alone.

`audit` and `hooks`, for training loops of others, read and write files besides and need nothing of training.
"""
