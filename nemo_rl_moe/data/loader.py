# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The order in which examples are trained on and validated with."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from nemo_rl_moe.data.collate import collate
from nemo_rl_moe.distributed.token_batch import TokenBatch
from nemo_rl_moe.errors import DataError

MakeBatch = Callable[[Sequence[Any], int], TokenBatch]
"""From examples and the token that pads them to a batch."""


class GlobalBatchLoader:
    """Gives the global batches of each epoch.

    The order depends on the seed and the epoch alone. The examples that do not fill a last batch are left out of that
    epoch, so that every optimizer step sees the same number of sequences; with shuffling they are others each time.

    Args:
        dataset: The examples.
        global_batch_size: Examples of one optimizer step, over all ranks.
        pad_token_id: What stands after an example's end.
        seed: Not negative.
        shuffle: False keeps the order of the data.
        make_batch: Puts examples side by side, whatever kind they are.

    Raises:
        DataError: The examples do not fill one batch.
    """

    def __init__(
        self,
        dataset: Sequence[Any],
        global_batch_size: int,
        pad_token_id: int,
        seed: int,
        shuffle: bool = True,
        make_batch: MakeBatch = collate,
    ):
        if len(dataset) < global_batch_size:
            raise DataError(
                f"policy.train_global_batch_size: got {global_batch_size}, but the training data has only "
                f"{len(dataset)} examples that can be used"
            )
        self._dataset = dataset
        self._global_batch_size = global_batch_size
        self._pad_token_id = pad_token_id
        self._seed = seed
        self._shuffle = shuffle
        self._make_batch = make_batch

    def __len__(self) -> int:
        """Batches of one epoch."""
        return len(self._dataset) // self._global_batch_size

    def epoch(self, epoch_index: int, first_batch: int = 0) -> Iterator[TokenBatch]:
        """The batches of one epoch from one of them on; both are counted from 0."""
        first = epoch_index * len(self)
        for chosen in self.indices(range(first + first_batch, first + len(self))):
            yield self._make_batch([self._dataset[index] for index in chosen], self._pad_token_id)

    def indices(self, batch_numbers: range) -> Iterator[list[int]]:
        """The examples of some batches, which are counted from 0 over all epochs."""
        for epoch_index in range(batch_numbers.start // len(self), -(-batch_numbers.stop // len(self))):
            order = epoch_order(len(self._dataset), self._seed, epoch_index, shuffle=self._shuffle)
            first = max(batch_numbers.start - epoch_index * len(self), 0)
            end = min(batch_numbers.stop - epoch_index * len(self), len(self))
            for batch_index in range(first, end):
                yield list(order[batch_index * self._global_batch_size :][: self._global_batch_size])


def epoch_order(size: int, seed: int, epoch_index: int, *, shuffle: bool) -> Sequence[int]:
    """The order of the items of one epoch, which depends on nothing but the arguments.

    Args:
        size: Number of items.
        seed: Not negative.
        epoch_index: Counted from 0.
        shuffle: False keeps the order of the data.
    """
    if not shuffle:
        return range(size)
    order: list[int] = np.random.default_rng([seed, epoch_index]).permutation(size).tolist()
    return order


def sequential_batches(
    dataset: Sequence[Any],
    batch_size: int,
    pad_token_id: int,
    max_batches: int | None = None,
    make_batch: MakeBatch = collate,
) -> Iterator[TokenBatch]:
    """The examples in their order, for validation; the last batch may be smaller, so that none is left out.

    Args:
        dataset: The examples.
        batch_size: Examples of a batch.
        pad_token_id: What stands after an example's end.
        max_batches: Stop after so many; None: all.
        make_batch: Puts examples side by side, whatever kind they are.
    """
    starts = range(0, len(dataset), batch_size)
    for start in starts[:max_batches]:
        stop = min(start + batch_size, len(dataset))
        yield make_batch([dataset[index] for index in range(start, stop)], pad_token_id)
