# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Generation by the ranks of the trained policy, with Megatron-Core's modules and a key-value cache."""

from nemo_rl_moe.models.megatron.generation.engine import MegatronGenerator

__all__ = ["MegatronGenerator"]
