# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The dispatcher of groups in asynchronous and synchronous runs: when prompts are sampled, and what a step trains on."""
