# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Contexts of use, by which vLLM chooses sizes of batches."""

from enum import StrEnum


class UsageContext(StrEnum):
    LLM_CLASS = "LLM_CLASS"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"
