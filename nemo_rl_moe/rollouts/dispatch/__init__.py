# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The dispatcher of groups: which prompts are sampled when, and which groups a step trains on. Synchronous too."""
