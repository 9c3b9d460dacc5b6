# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Parameters of sampling, of which length and seed are read."""

from enum import Enum
from typing import Any


class RequestOutputKind(Enum):
    """Outputs that are asked for."""

    FINAL_ONLY = 2


class SamplingParams:
    """Any parameters."""

    def __init__(self, *, max_tokens: int, seed: int | None = None, **others: Any):
        self.max_tokens, self.seed = max_tokens, seed
