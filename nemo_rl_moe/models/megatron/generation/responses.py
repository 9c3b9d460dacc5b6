# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The responses of a batch as they grow, on the host."""

import numpy as np
from jaxtyping import Bool, Float, Int

from nemo_rl_moe.generation.interface import GeneratedSequence
from nemo_rl_moe.models.megatron.generation.stopping import StopCondition


class Responses:
    """Tokens, log-probabilities and ends of the responses of a batch.

    Args:
        num_responses: How many.
        max_new_tokens: Most tokens of each.
        stop: Ends them earlier.
    """

    def __init__(self, num_responses: int, max_new_tokens: int, stop: StopCondition):
        self._token_ids = np.zeros((num_responses, max_new_tokens), dtype=np.int64)
        self._logprobs = np.zeros((num_responses, max_new_tokens), dtype=np.float32)
        self._lengths = np.zeros(num_responses, dtype=np.int64)
        self._stopped = np.zeros(num_responses, dtype=np.bool_)
        self._max_new_tokens = max_new_tokens
        self._stop = stop

    def append(
        self,
        responses: Int[np.ndarray, " rows"],
        token_ids: Int[np.ndarray, " rows"],
        logprobs: Float[np.ndarray, " rows"],
        sampled: Bool[np.ndarray, " rows"],
    ) -> Bool[np.ndarray, " rows"]:
        """Adds a token to each response that has not ended.

        Args:
            responses: Which response each row of the batch is.
            token_ids: A token for each row.
            logprobs: Their log-probabilities.
            sampled: False where a row is still at its prompt; its token does not count.

        Returns:
            Which rows have ended.
        """
        open_rows = sampled & ~self._ended(responses)
        growing = responses[open_rows]
        column = self._lengths[growing]
        self._token_ids[growing, column] = token_ids[open_rows]
        self._logprobs[growing, column] = logprobs[open_rows]
        self._lengths[growing] = column + 1
        self._stopped[growing] = self._stop.ended(self._token_ids[growing], column + 1)
        return self._ended(responses)

    def _ended(self, responses: Int[np.ndarray, " rows"]) -> Bool[np.ndarray, " rows"]:
        ended: Bool[np.ndarray, " rows"] = self._stopped[responses] | (self._lengths[responses] >= self._max_new_tokens)
        return ended

    def sequences(self, weight_version: int) -> list[GeneratedSequence]:
        """The finished responses, in their order.

        Raises:
            RuntimeError: A log-probability is not a finite number: the weights are not, or a pass over them went wrong.
        """
        if not np.isfinite(self._logprobs).all():
            broken = int((~np.isfinite(self._logprobs)).any(axis=1).sum())
            raise RuntimeError(
                f"{broken} of {len(self._lengths)} responses have tokens whose log-probability is NaN or infinite, made"
                f" with the weights after {weight_version} optimizer steps: the model's output is not finite"
            )
        return [
            GeneratedSequence(
                token_ids=self._token_ids[index, :length].copy(),
                logprobs=self._logprobs[index, :length].copy(),
                is_truncated=not self._stopped[index],
                weight_version=weight_version,
            )
            for index, length in enumerate(self._lengths)
        ]
