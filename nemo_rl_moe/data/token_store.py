# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Many tokenized examples in few arrays."""

from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from nemo_rl_moe.data.chat import TokenizedExample


class TokenStore(Sequence[TokenizedExample]):
    """A list of tokenized examples that is kept in three flat arrays: 5 bytes a token.

    Args:
        examples: The examples, in order.
    """

    def __init__(self, examples: Sequence[TokenizedExample]):
        self._starts: NDArray[np.int64] = np.cumsum([0, *(len(example) for example in examples)], dtype=np.int64)
        # The empty array in front lets an empty list be joined too.
        self._input_ids = np.concatenate([np.empty(0, np.int32), *(example.input_ids for example in examples)])
        self._token_mask = np.concatenate([np.empty(0, np.bool_), *(example.token_mask for example in examples)])
        self._truncated = [example.truncated for example in examples]
        self._sample_ids = [example.sample_id for example in examples]

    def __len__(self) -> int:
        return len(self._sample_ids)

    @overload
    def __getitem__(self, index: int) -> TokenizedExample: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenizedExample]: ...
    def __getitem__(self, index: int | slice) -> TokenizedExample | list[TokenizedExample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]  # knows negative indices, and raises IndexError past the end
        piece = slice(self._starts[position], self._starts[position + 1])
        return TokenizedExample(
            self._input_ids[piece], self._token_mask[piece], self._truncated[position], self._sample_ids[position]
        )
