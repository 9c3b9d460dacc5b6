# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Dispatch of groups, asynchronous or not: when prompts are sampled, and which groups a step trains on."""
