# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""When a response ends."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from nemo_rl_moe.generation.interface import SamplingParameters

# Decoding from the middle can garble what the first tokens stand for: half a character, a space that is left out.
_MARGIN = 8


class StopCondition:
    """Tells the responses that their last token ends.

    Args:
        parameters: The stop tokens and stop strings.
        tokenizer: Decodes tokens; needed for stop strings alone.

    Raises:
        ValueError: Stop strings without a tokenizer, or an empty one.
    """

    def __init__(self, parameters: SamplingParameters, tokenizer: Any):
        if parameters.stop_strings and tokenizer is None:
            raise ValueError("stop_strings need a tokenizer, and this engine was given none; use stop_token_ids")
        if not all(parameters.stop_strings):
            raise ValueError("stop_strings: got an empty string, which would end every response at once")
        self._token_ids = np.asarray(parameters.stop_token_ids, dtype=np.int64)
        self._strings = parameters.stop_strings
        self._tokenizer = tokenizer
        # A token stands for at least one byte.
        self._window = max((len(string.encode()) for string in self._strings), default=0) + _MARGIN

    def ended(
        self, responses: Int[np.ndarray, "rows columns"], lengths: Int[np.ndarray, " rows"]
    ) -> Bool[np.ndarray, " rows"]:
        """Whether the last token of each response ends it. To be asked after every token.

        Args:
            responses: Token ids; whatever lies beyond the length does not count.
            lengths: Tokens of each so far; never with 0, which has no last token.
        """
        last = responses[np.arange(len(lengths)), np.maximum(lengths, 1) - 1]
        # For so few numbers faster than numpy's isin.
        found = (last[:, None] == self._token_ids).any(1) & (lengths > 0)
        if self._strings:
            for row in np.flatnonzero(~found & (lengths > 0)):
                end = lengths[row]
                found[row] = self._completes_string(responses[row, max(0, end - self._window) : end].tolist())
        return found

    def _completes_string(self, token_ids: Sequence[int]) -> bool:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(string in text for string in self._strings)
