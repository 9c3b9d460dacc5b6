# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What does not depend on torch: recipes."""

from transformer_engine.common import recipe

__all__ = ["recipe"]
