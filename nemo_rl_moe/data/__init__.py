# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Data: reads files of conversations, pairs and prompts, and makes padded batches of tokens."""
