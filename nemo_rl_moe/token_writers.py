# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The writer of each token of a conversation: the prompt, the model or the environment. It follows from the positions
of sampled tokens."""

import numpy as np

from nemo_rl_moe.shapes import Bool, Int

TOKEN_WRITERS = "token_writers"
"""Name of the batch column with the writer of each token, as index in `WRITERS`."""
PROMPT, CALL, RESULT, ANSWER = range(4)
WRITERS = ("prompt", "call", "result", "answer")
"""Writers of tokens, by their names in files and metrics.

prompt: tokens before the first sampled token. call: sampled tokens of all responses but the last. result: tokens that
the environment adds after a response, with the chat template's markup. answer: sampled tokens of the last response.
"""


def token_writers(is_sampled: Bool[np.ndarray, " tokens"]) -> Int[np.ndarray, " tokens"]:
    """Return the writer of each token of a sequence (prompt, model or environment) as index in `WRITERS`."""
    sampled = np.flatnonzero(is_sampled)
    writers = np.full(len(is_sampled), PROMPT, dtype=np.int8)
    if not len(sampled):
        return writers
    first, last = sampled[0], sampled[-1]
    writers[first:] = np.where(is_sampled[first:], CALL, RESULT)
    given = np.flatnonzero(~is_sampled[: last + 1])
    writers[given[-1] + 1 if len(given) else 0 : last + 1] = ANSWER
    return writers
