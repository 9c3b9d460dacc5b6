# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The order in which examples are trained on and validated with."""

from collections.abc import Iterator, Sequence

import numpy as np

from nemo_rl_moe.data.chat import TokenizedExample
from nemo_rl_moe.data.collate import collate
from nemo_rl_moe.distributed.token_batch import TokenBatch
from nemo_rl_moe.errors import DataError


class GlobalBatchLoader:
    """Gives the global batches of each epoch.

    The order depends on the seed and the epoch alone. The examples that do not fill a last batch are left out of that
    epoch, so that every optimizer step sees the same number of sequences; with shuffling they are others each time.

    Args:
        dataset: The examples.
        global_batch_size: Sequences of one optimizer step, over all ranks.
        pad_token_id: What stands after an example's end.
        seed: Not negative.
        shuffle: False keeps the order of the data.

    Raises:
        DataError: The examples do not fill one batch.
    """

    def __init__(
        self,
        dataset: Sequence[TokenizedExample],
        global_batch_size: int,
        pad_token_id: int,
        seed: int,
        shuffle: bool = True,
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

    def __len__(self) -> int:
        """Batches of one epoch."""
        return len(self._dataset) // self._global_batch_size

    def epoch(self, epoch_index: int) -> Iterator[TokenBatch]:
        """The batches of one epoch, counted from 0."""
        order = epoch_order(len(self._dataset), self._seed, epoch_index, shuffle=self._shuffle)
        for batch_index in range(len(self)):
            chosen = order[batch_index * self._global_batch_size :][: self._global_batch_size]
            yield collate([self._dataset[int(index)] for index in chosen], self._pad_token_id)


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
    dataset: Sequence[TokenizedExample], batch_size: int, pad_token_id: int, max_batches: int | None = None
) -> Iterator[TokenBatch]:
    """The examples in their order, for validation; the last batch may be smaller, so that none is left out.

    Args:
        dataset: The examples.
        batch_size: Sequences of a batch.
        pad_token_id: What stands after an example's end.
        max_batches: Stop after so many; None: all.
    """
    starts = range(0, len(dataset), batch_size)
    for start in starts[:max_batches]:
        stop = min(start + batch_size, len(dataset))
        yield collate([dataset[index] for index in range(start, stop)], pad_token_id)
