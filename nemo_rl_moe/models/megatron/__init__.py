# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Everything that imports Megatron-Core.

Each module here imports `cpu_backend` before `megatron.core`; on a machine with an accelerator that changes nothing.
"""
