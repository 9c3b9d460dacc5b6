# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Parameters of sampling; top-k, top-p and stop strings are not read."""

from collections.abc import Sequence
from enum import Enum
from typing import Any


class RequestOutputKind(Enum):
    FINAL_ONLY = 2


class SamplingParams:
    def __init__(
        self,
        *,
        max_tokens: int,
        seed: int | None = None,
        temperature: float = 1.0,
        stop_token_ids: Sequence[int] = (),
        prompt_logprobs: int | None = None,
        **others: Any,
    ):
        self.max_tokens, self.seed, self.temperature = max_tokens, seed, temperature
        self.stop_token_ids, self.prompt_logprobs = stop_token_ids, prompt_logprobs
