# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A dense model as small as the one with experts."""

from typing import Any

from transformers import Qwen3Config

from tests.support.tiny_model import TINY


def tiny_dense_hf_config(**changes: Any) -> Qwen3Config:
    """Return the four layers, grouped-query attention, a vocabulary of 64."""
    return Qwen3Config(**{**TINY, **changes})
