# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""OpenAI's API: requests, replies, and HTTP on the loopback interface, for agents and for served models."""
