# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Serving of a model by OpenAI's API, with the routed experts of its responses."""
