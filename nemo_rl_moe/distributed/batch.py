# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Batches of token sequences with typed columns, and their shards for data-parallel ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from nemo_rl_moe.distributed.shared_arrays import ArrayStore, SharedColumn
from nemo_rl_moe.distributed.stored_rows import Fetch, StoredRows, fetch_rows

FILLER_LENGTH = 2
"""Number of tokens of a filler row. With fewer, the row would have no target."""


class Axis(Enum):
    """Axis along which a column has its values."""

    SEQUENCE = "sequence"
    """One value (of any further shape) for each sequence."""
    TOKEN = "token"
    """One value (of any further shape) for each token."""
    RAGGED = "ragged"
    """Any number of values for each sequence, such as the sizes of its images."""
    SHARED = "shared"
    """Any number of arrays for each sequence, such as the pixels of its images. Sequences may share arrays."""


class Destination(Enum):
    """Consumer of a column: the model or the loss."""

    MODEL = "model"
    """The model, in training, log-probability and evaluation passes."""
    LOSS = "loss"


@dataclass(frozen=True)
class ModelInput:
    """A further input of the model for one sequence, such as an image.

    Attributes:
        values: `[tokens, ...]` on the token axis, `[...]` on the sequence axis, `[values, ...]` if ragged. If shared, a
            tuple of `SharedArray`, with identical objects in all sequences that share them.
        fill: Value on padding, on the token axis.
    """

    values: Any
    axis: Axis
    fill: float = 0.0


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on a device, without waiting. For a GPU, the copy uses pinned memory."""
    from_host = device.type == "cuda" and tensor.device.type == "cpu"
    return (tensor.contiguous().pin_memory() if from_host else tensor).to(device, non_blocking=True)


@dataclass(frozen=True)
class Column:
    """A further tensor of a batch, with an explicit axis and reader.

    Attributes:
        values: `[batch, ...]` on the sequence axis, `[batch, sequence, ...]` on the token axis, and if ragged
            `[sum of sizes, ...]`, sequence after sequence.
        sizes: Number of values of each sequence, if ragged.
        fill: Value on padding, such as -1 for routed experts.
    """

    values: Shaped[Tensor, "..."]
    axis: Axis
    goes_to: Destination = Destination.LOSS
    sizes: Int[Tensor, " batch"] | None = None
    fill: float = 0.0

    def __post_init__(self) -> None:
        if (self.sizes is not None) != (self.axis is Axis.RAGGED):
            raise ValueError(f"a column must have sizes if it is ragged, and only then; got axis {self.axis.value}")

    def select(self, indices: Int[Tensor, " selected"], longest: int) -> "Column":
        """Return the column of the sequences at `indices`, in that order, cut to their first `longest` tokens."""
        if self.axis is Axis.SEQUENCE:
            return replace(self, values=self.values[indices])
        if self.axis is Axis.TOKEN:
            return replace(self, values=self.values[indices, :longest])
        assert self.sizes is not None
        parts = self.values.split(self.sizes.tolist())
        chosen = [parts[index] for index in indices.tolist()]
        return replace(self, values=torch.cat(chosen) if chosen else self.values[:0], sizes=self.sizes[indices])

    def with_empty_rows(self, number: int) -> "Column":
        """Append `number` filler rows, which hold padding instead of a sequence. In a ragged column, they are empty."""
        if self.axis is Axis.RAGGED:
            assert self.sizes is not None
            return replace(self, sizes=torch.cat([self.sizes, self.sizes.new_zeros(number)]))
        rows = self.values.new_full((number, *self.values.shape[1:]), self.fill)
        return replace(self, values=torch.cat([self.values, rows]))

    def to(self, device: torch.device) -> "Column":
        """Copy to a device without waiting."""
        sizes = None if self.sizes is None else to_device(self.sizes, device)
        return replace(self, values=to_device(self.values, device), sizes=sizes)

    def of_targets(self) -> "Column":
        """Return the column without each sequence's first token, which is never a target, as in log-probabilities."""
        return replace(self, values=self.values[:, 1:]) if self.axis is Axis.TOKEN else self


@dataclass(frozen=True)
class StoredColumn:
    """A column for the model on the token axis whose values stay in a store until a rank fetches them.

    Attributes:
        rows: For each sequence, the handle of its stored rows (one per token), or None if it has no rows.
        fill: Value on padding and for tokens without a row.
    """

    rows: tuple[StoredRows | None, ...]
    row_shape: tuple[int, ...]
    dtype: str
    fill: float = 0.0

    def select(self, indices: Int[Tensor, " selected"]) -> "StoredColumn":
        return replace(self, rows=tuple(self.rows[index] for index in indices.tolist()))


def stored_per_token(rows: Sequence[StoredRows | None], fill: float = 0.0) -> StoredColumn | None:
    """Return a column with the stored rows of each sequence, one row per token. None if no sequence has rows."""
    first = next((found for found in rows if found is not None), None)
    return None if first is None else StoredColumn(tuple(rows), first.row_shape, first.dtype, fill)


def per_sequence(values: Shaped[Tensor, "batch ..."], goes_to: Destination = Destination.LOSS) -> Column:
    return Column(values, Axis.SEQUENCE, goes_to)


def per_token(
    values: Shaped[Tensor, "batch sequence ..."], goes_to: Destination = Destination.LOSS, fill: float = 0.0
) -> Column:
    return Column(values, Axis.TOKEN, goes_to, fill=fill)


def collate_inputs(inputs: Sequence[ModelInput], longest: int) -> Column:
    """Combine one input of each sequence into a column for the model.

    Args:
        inputs: Inputs with the same axis, not `SHARED`. Their shapes may only differ in the number of values.
        longest: Number of tokens to which inputs on the token axis are padded.
    """
    first = inputs[0]
    if first.axis is Axis.SHARED:
        raise ValueError("inputs on the shared axis cannot form a column: pass them to TokenBatch.with_inputs")
    if any(entry.axis is not first.axis for entry in inputs):
        raise ValueError(
            f"a model input needs the same axis in all sequences, got {sorted({entry.axis.value for entry in inputs})}"
        )
    tensors = [torch.as_tensor(entry.values) for entry in inputs]
    if first.axis is Axis.SEQUENCE:
        return Column(torch.stack(tensors), Axis.SEQUENCE, Destination.MODEL)
    if first.axis is Axis.RAGGED:
        sizes = torch.tensor([len(tensor) for tensor in tensors])
        return Column(torch.cat(tensors), Axis.RAGGED, Destination.MODEL, sizes)
    values = tensors[0].new_full((len(tensors), longest, *tensors[0].shape[1:]), first.fill)
    for row, tensor in enumerate(tensors):
        values[row, : len(tensor)] = tensor
    return Column(values, Axis.TOKEN, Destination.MODEL, fill=first.fill)


@dataclass(frozen=True)
class TokenBatch:
    """Right-padded token sequences with a mask of the tokens that are trained on.

    Attributes:
        lengths: Number of tokens of each sequence without padding.
        token_mask: True on tokens that count in the loss *as a target* (position `t` is predicted from position
            `t - 1`), False on prompts and padding.
        sample_ids: Id of the sample of each sequence, for error messages.
        group_size: Number of consecutive sequences that form a group. A group always runs in one microbatch.
            `policy.train_micro_batch_size` counts groups.
        stored: Columns that a rank fetches when it needs them, by name.
        shared: Columns for the model whose arrays may be shared by sequences, by name.
        sample_sizes: Number of consecutive sequences of each sample. If empty, each group is a sample.
            `policy.train_global_batch_size` counts samples. `select` drops the sizes, as it may split samples.
        shares_prefixes: Whether the model computes a prefix that sequences of a microbatch share only once.
        is_filler: True for rows without a sequence, which only give all ranks the same number of microbatches. They
            have no effect on any result. None without fillers.
    """

    input_ids: Int[Tensor, "batch sequence"]
    lengths: Int[Tensor, " batch"]
    token_mask: Bool[Tensor, "batch sequence"]
    sample_ids: tuple[str, ...]
    columns: Mapping[str, Column] = field(default_factory=dict)
    group_size: int = 1
    stored: Mapping[str, StoredColumn] = field(default_factory=dict)
    shared: Mapping[str, SharedColumn] = field(default_factory=dict)
    sample_sizes: tuple[int, ...] = ()
    is_filler: Bool[Tensor, " batch"] | None = None
    shares_prefixes: bool = False

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def select(self, indices: Sequence[int]) -> "TokenBatch":
        """Return the sequences at `indices` (complete groups), in that order, cut to the longest of them."""
        index = torch.as_tensor(indices, dtype=torch.long)
        longest = int(self.lengths[index].max()) if len(index) else 0
        return TokenBatch(
            input_ids=self.input_ids[index, :longest],
            lengths=self.lengths[index],
            token_mask=self.token_mask[index, :longest],
            sample_ids=tuple(self.sample_ids[i] for i in indices),
            columns={name: column.select(index, longest) for name, column in self.columns.items()},
            group_size=self.group_size,
            stored={name: column.select(index) for name, column in self.stored.items()},
            shared={name: column.select(indices) for name, column in self.shared.items()},
            is_filler=None if self.is_filler is None else self.is_filler[index],
            shares_prefixes=self.shares_prefixes,
        )

    @property
    def counted_lengths(self) -> Int[Tensor, " batch"]:
        """Number of tokens of each sequence, 0 for fillers."""
        return self.lengths if self.is_filler is None else self.lengths.where(~self.is_filler, 0)

    def first_rows_of_samples(self) -> list[int]:
        """Return the index of the first sequence of each sample."""
        sizes = self.sample_sizes or (self.group_size,) * (len(self) // self.group_size)
        return [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]

    def with_columns(self, **columns: Column) -> "TokenBatch":
        """Return the batch with further or replaced columns."""
        return replace(self, columns={**self.columns, **columns})

    def with_inputs(self, inputs: Sequence[Mapping[str, ModelInput]]) -> "TokenBatch":
        """Return the batch with further inputs of the model. Requires the same names of inputs in all sequences."""
        columns, shared = dict(self.columns), dict(self.shared)
        for name, first in inputs[0].items():
            of_sequences = [each[name] for each in inputs]
            if first.axis is Axis.SHARED:
                shared[name] = SharedColumn(tuple(tuple(each.values) for each in of_sequences))
            else:
                columns[name] = collate_inputs(of_sequences, self.input_ids.shape[1])
        return replace(self, columns=columns, shared=shared)

    def columns_for(self, reader: Destination) -> dict[str, Column]:
        """Return the columns that a reader (model or loss) uses, except stored ones."""
        return {name: column for name, column in self.columns.items() if column.goes_to is reader}

    def with_stored(self, name: str, column: StoredColumn) -> "TokenBatch":
        return replace(self, stored={**self.stored, name: column})

    def without_stored(self, *names: str) -> "TokenBatch":
        return replace(self, stored={other: column for other, column in self.stored.items() if other not in names})

    def for_model(self) -> "TokenBatch":
        """Return the batch with only the columns for the model, stored ones included."""
        return replace(self, columns=self.columns_for(Destination.MODEL))

    def for_loss(self) -> "TokenBatch":
        """Return the batch with only the columns for the loss."""
        return replace(self, columns=self.columns_for(Destination.LOSS), stored={}, shared={})

    def with_shared_in(self, store: ArrayStore) -> "TokenBatch":
        """Put the shared arrays into a store, and return the batch with handles instead of these arrays."""
        shared = {name: replace(column, arrays=store.place(column.arrays)) for name, column in self.shared.items()}
        return replace(self, shared=shared)

    def fetched(self, fetch: Fetch, *, with_shared: bool = True) -> "TokenBatch":
        """Return the batch with its stored columns and shared arrays fetched.

        Args:
            with_shared: If False, the result has no shared arrays.
        """
        found = {}
        for name, column in self.stored.items():
            longest = self.input_ids.shape[1]
            values = fetch_rows(column.rows, longest, column.fill, fetch, column.row_shape, column.dtype)
            found[name] = per_token(torch.from_numpy(values), Destination.MODEL, column.fill)
        shared = {name: column.fetched(fetch) for name, column in self.shared.items()} if with_shared else {}
        return replace(self, columns={**self.columns, **found}, stored={}, shared=shared)

    def to(self, device: torch.device) -> "TokenBatch":
        """Return a copy on a device, without waiting. Shared arrays stay on the host."""
        return replace(
            self,
            input_ids=to_device(self.input_ids, device),
            lengths=to_device(self.lengths, device),
            token_mask=to_device(self.token_mask, device),
            is_filler=None if self.is_filler is None else to_device(self.is_filler, device),
            columns={name: column.to(device) for name, column in self.columns.items()},
        )

    def num_valid_tokens(self) -> int:
        """Return the number of targets in the loss. The first token of a sequence is never a target."""
        return int(self.token_mask[:, 1:].sum())


@dataclass(frozen=True)
class GlobalBatchShard:
    """One data-parallel rank's shard of a global batch.

    Attributes:
        microbatches: Microbatches in execution order. Every rank has the same number of them.
        global_valid_tokens: Number of targets in the loss, over all ranks.
        global_sequences: Number of sequences with such a target, over all ranks.
        global_tokens: Number of tokens without padding, over all ranks.
        global_rows: Number of sequences, not counting filler rows, over all ranks.
        places: For each sequence of the microbatches, its index in the full batch.
        samples: For each sequence of the microbatches, the index of its sample in the full batch.
        num_batch_sequences: Number of sequences of the full batch, over all ranks and global batches.
    """

    microbatches: tuple[TokenBatch, ...]
    global_valid_tokens: int
    global_sequences: int
    global_tokens: int
    global_rows: int
    places: tuple[int, ...]
    samples: tuple[int, ...]
    num_batch_sequences: int


def count_trained_sequences(batch: TokenBatch) -> int:
    """Return the number of sequences with at least one token that counts in the loss."""
    return int(batch.token_mask[:, 1:].any(dim=1).sum())


def make_shard(batch: TokenBatch, microbatches: Sequence[Sequence[int]], totals: TokenBatch) -> GlobalBatchShard:
    """Return one rank's shard of the global batch `totals`, from the sequence indices of its microbatches."""
    return make_shards(batch, [microbatches], totals)[0]


def make_shards(
    batch: TokenBatch, by_rank: Sequence[Sequence[Sequence[int]]], totals: TokenBatch
) -> list[GlobalBatchShard]:
    """Return the shard of each rank.

    Args:
        by_rank: Sequence indices of each microbatch, for each data-parallel rank.
        totals: The global batch of all ranks, by which the loss is normalized.
    """
    valid_tokens, sequences = totals.num_valid_tokens(), count_trained_sequences(totals)
    lengths = totals.counted_lengths
    sizes = batch.sample_sizes or (1,) * len(batch)
    samples = [sample for sample, size in enumerate(sizes) for _ in range(size)]
    samples += range(len(samples), len(batch))  # fillers
    return [
        GlobalBatchShard(
            microbatches=tuple(batch.select(indices) for indices in microbatches),
            global_valid_tokens=valid_tokens,
            global_sequences=sequences,
            global_tokens=int(lengths.sum()),
            global_rows=int((lengths > 0).sum()),
            places=tuple(index for indices in microbatches for index in indices),
            samples=tuple(samples[index] for indices in microbatches for index in indices),
            num_batch_sequences=len(batch),
        )
        for microbatches in by_rank
    ]


def shared_with_previous(batch: TokenBatch) -> list[int]:
    """Return for each sequence the number of its first tokens that it shares with the sequence before it."""
    equal = (batch.input_ids[1:] == batch.input_ids[:-1]).long().cumprod(1).sum(1)
    return [0, *torch.minimum(equal, torch.minimum(batch.lengths[1:], batch.lengths[:-1])).tolist()][: len(batch)]


def with_empty_rows(batch: TokenBatch, number: int) -> TokenBatch:
    """Return the batch with `number` fillers, rows of padding, after its sequences."""
    if not number:
        return batch
    longest = batch.input_ids.shape[1]
    return replace(
        batch,
        input_ids=torch.cat([batch.input_ids, batch.input_ids.new_zeros(number, longest)]),
        lengths=torch.cat([batch.lengths, batch.lengths.new_full((number,), FILLER_LENGTH)]),
        token_mask=torch.cat([batch.token_mask, batch.token_mask.new_zeros(number, longest)]),
        sample_ids=(*batch.sample_ids, *("filler",) * number),
        columns={name: column.with_empty_rows(number) for name, column in batch.columns.items()},
        stored={name: replace(each, rows=each.rows + (None,) * number) for name, each in batch.stored.items()},
        shared={name: replace(each, arrays=each.arrays + ((),) * number) for name, each in batch.shared.items()},
        is_filler=torch.arange(len(batch) + number) >= len(batch),
    )


def append_fillers(batch: TokenBatch, fillers: Sequence[int]) -> TokenBatch:
    """Append copies of the sequences at the indices `fillers` to the batch. The loss does not count the copies."""
    if not fillers:
        return batch
    filled = batch.select([*range(len(batch)), *fillers])
    token_mask = filled.token_mask.clone()
    token_mask[len(batch) :] = False
    without = {
        name: replace(column, rows=column.rows[: len(batch)] + (None,) * len(fillers))
        for name, column in filled.stored.items()
    }
    return replace(filled, token_mask=token_mask, stored=without)
