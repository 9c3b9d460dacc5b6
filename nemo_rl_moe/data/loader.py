# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Padded batches of tokenized examples, and the order of examples over epochs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_rl_moe.data.chat import TokenizedExample
from nemo_rl_moe.data.image_tokens import batch_inputs
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.errors import DataError


def collate(examples: Sequence[TokenizedExample], pad_token_id: int) -> TokenBatch:
    """Return a batch of examples, padded on the right to the length of the longest one."""
    lengths = torch.tensor([len(example) for example in examples], dtype=torch.long)
    shape = (len(examples), int(lengths.max()))
    input_ids = torch.full(shape, pad_token_id, dtype=torch.long)
    token_mask = torch.zeros(shape, dtype=torch.bool)
    for row, example in enumerate(examples):
        input_ids[row, : len(example)] = torch.as_tensor(example.input_ids, dtype=torch.long)
        token_mask[row, : len(example)] = torch.as_tensor(example.token_mask)
    names = tuple(example.sample_id for example in examples)
    inputs = batch_inputs([(example.images, len(example)) for example in examples])
    return TokenBatch(input_ids, lengths, token_mask, names).with_inputs(inputs)


def token_ids_and_images(examples: Iterable[TokenizedExample]) -> Iterator[NDArray[Any]]:
    """Yield, for each example, its token ids followed by the digests of its images. These numbers identify a data
    set."""
    for example in examples:
        digests = example.images.digests() if example.images is not None else ()
        yield np.concatenate([example.input_ids, np.frombuffer(b"".join(digests), dtype=np.int32)])


class TokenStore(Sequence[TokenizedExample]):
    """Sequence of tokenized examples, stored in three flat arrays with 5 bytes per token. Images are stored as
    references."""

    def __init__(self, examples: Sequence[TokenizedExample]):
        self._starts: NDArray[np.int64] = np.cumsum([0, *(len(example) for example in examples)], dtype=np.int64)
        # `concatenate` needs at least one array.
        self._input_ids = np.concatenate([np.empty(0, np.int32), *(example.input_ids for example in examples)])
        self._token_mask = np.concatenate([np.empty(0, np.bool_), *(example.token_mask for example in examples)])
        self._truncated = [example.truncated for example in examples]
        self._sample_ids = [example.sample_id for example in examples]
        self._images = [example.images for example in examples]
        self._notes = [example.notes for example in examples]

    def __len__(self) -> int:
        return len(self._sample_ids)

    @overload
    def __getitem__(self, index: int) -> TokenizedExample: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenizedExample]: ...
    def __getitem__(self, index: int | slice) -> TokenizedExample | list[TokenizedExample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]  # accepts negative indices, and raises IndexError past the end
        piece = slice(self._starts[position], self._starts[position + 1])
        return TokenizedExample(
            self._input_ids[piece],
            self._token_mask[piece],
            self._truncated[position],
            self._sample_ids[position],
            self._images[position],
            self._notes[position],
        )


MakeBatch = Callable[[Sequence[Any], int], TokenBatch]
"""A function that makes a batch from examples and the id of the padding token."""


class GlobalBatchLoader:
    """Iterates over the global batches of each epoch.

    The order only depends on the seed and the epoch. An epoch skips the last examples if they do not fill a batch, so
    that every optimizer step has the same number of sequences. With shuffling, each epoch skips different examples.
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
        """Return the number of batches of one epoch."""
        return len(self._dataset) // self._global_batch_size

    def epoch(self, epoch_index: int, first_batch: int = 0) -> Iterator[TokenBatch]:
        """Yield the batches of an epoch, beginning with `first_batch`. Epochs and batches are counted from 0."""
        first = epoch_index * len(self)
        for chosen in self.indices(range(first + first_batch, first + len(self))):
            yield self._make_batch([self._dataset[index] for index in chosen], self._pad_token_id)

    def indices(self, batch_numbers: range) -> Iterator[list[int]]:
        """Yield the indices of the examples of each batch. Batches are counted from 0 over all epochs."""
        for epoch_index in range(batch_numbers.start // len(self), -(-batch_numbers.stop // len(self))):
            order = epoch_order(len(self._dataset), self._seed, epoch_index, shuffle=self._shuffle)
            first = max(batch_numbers.start - epoch_index * len(self), 0)
            end = min(batch_numbers.stop - epoch_index * len(self), len(self))
            for batch_index in range(first, end):
                yield list(order[batch_index * self._global_batch_size :][: self._global_batch_size])


def epoch_order(size: int, seed: int, epoch_index: int, *, shuffle: bool) -> Sequence[int]:
    """Return the indices of the items in the order of one epoch. The order only depends on the arguments."""
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
    """Yield batches of examples in order, for validation. The last batch may be smaller."""
    for start in range(0, len(dataset), batch_size)[:max_batches]:
        yield make_batch(dataset[start : start + batch_size], pad_token_id)
