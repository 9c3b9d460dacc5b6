# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The engine `megatron_separate`: additional Megatron-Core workers, each with its own copy of the weights."""
