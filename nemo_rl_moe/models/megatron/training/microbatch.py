# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""From a microbatch of sequences to the tensors that Megatron-Core's GPTModel takes, padded or packed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Bool, Int, Shaped
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from nemo_rl_moe.distributed.batch import Axis, Column, Destination, TokenBatch, to_device
from nemo_rl_moe.distributed.bin_packing import round_up
from nemo_rl_moe.models.image_positions import image_positions
from nemo_rl_moe.models.images import IMAGE_IDS, IMAGE_SIZES, IS_IMAGE, ON_HOST, PIXELS, distinct_pixels
from nemo_rl_moe.models.megatron.training.context_parallel import ALONE, ContextCut, ContextPlace


@dataclass(frozen=True)
class ModelMicrobatch:
    """One microbatch as the model takes it. `rows x columns` is `batch x sequence` or, packed, `1 x all tokens`.

    With context parallelism the tensors for the model hold this rank's columns alone (`context`); everything else, such
    as `sequence_start`, speaks of whole rows.

    Attributes:
        labels: The token after each position, 0 where there is none.
        position_ids: What the rotary embedding turns by: the position within the sequence or, of a model with positions
            in time, height and width, all three of them, `[3, rows, columns]`.
        offsets: Position within the sequence.
        padding_mask: True on padding; None where there is none.
        packed_seq_params: Where each packed sequence begins; None when padded.
        sequence_start: Flat position of each sequence's first token.
        batch: The sequences themselves, with the columns for the loss, on the device.
        model_columns: The batch's columns for the model: `[rows, columns, ...]` on the token axis, with the column's
            fill value on padding; `[rows, ...]` or, packed, `[sequences, ...]` on the sequence axis; where ragged, all
            sequences' values behind one another; pixels as `models.images` says.
    """

    input_ids: Int[Tensor, "rows columns"]
    labels: Int[Tensor, "rows columns"]
    position_ids: Int[Tensor, "*three rows columns"]
    offsets: Int[Tensor, "rows columns"]
    padding_mask: Bool[Tensor, "rows columns"] | None
    packed_seq_params: PackedSeqParams | None
    sequence_start: Int[Tensor, " batch"]
    batch: TokenBatch
    model_columns: Mapping[str, Tensor]
    context: ContextCut | None = None

    @property
    def num_columns(self) -> int:
        return self.input_ids.shape[1] if self.context is None else len(self.context.order)

    def part(self, values: Shaped[Tensor, "rows whole_columns ..."]) -> Shaped[Tensor, "rows columns ..."]:
        """Return the columns of whole rows that the model on this rank sees."""
        return values if self.context is None else self.context.part(values)

    def whole(self, values: Shaped[Tensor, "rows columns ..."]) -> Shaped[Tensor, "rows whole_columns ..."]:
        """Return the whole rows; with context parallelism all ranks that share them call it."""
        return values if self.context is None else self.context.whole(values)

    def local_columns(self, columns: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Return where this rank's model holds columns of the whole rows; -1: nowhere."""
        return columns if self.context is None else self.context.local[columns]

    def at_tokens(
        self, values: Shaped[Tensor, "batch tokens"], counts: Bool[Tensor, "batch tokens"], other: Any
    ) -> Shaped[Tensor, "rows columns"]:
        """Return values of the sequences' first tokens at their places in what the model on this rank sees."""
        rows, columns = self.input_ids.shape[0], self.num_columns
        if self.packed_seq_params is None:  # sequences are rows: fewer operations
            found = torch.full((rows, columns), other, dtype=values.dtype, device=values.device)
            found[: len(values), : values.shape[1]] = values.where(counts, other)
            return self.part(found)
        # The place behind the last one takes what does not count.
        flat = torch.full((rows * columns + 1,), other, dtype=values.dtype, device=values.device)
        places = self.sequence_start[:, None] + torch.arange(values.shape[1], device=values.device)
        flat.scatter_(0, places.where(counts, len(flat) - 1).reshape(-1), values.reshape(-1))
        return self.part(flat[:-1].view(rows, columns))

    def per_sequence(self, values: Tensor) -> Tensor:
        """Bring values of flat positions back to one row a sequence; a collective of `whole`.

        Returns:
            [batch, longest - 1, ...]; entries beyond a sequence's length are those of other positions: mask them.
        """
        values = self.whole(values)
        longest = self.batch.input_ids.shape[1]
        if self.packed_seq_params is None:
            return values[: len(self.batch), : longest - 1]
        offsets = torch.arange(longest - 1, device=values.device)
        index = (self.sequence_start[:, None] + offsets).clamp_(max=values.shape[0] * values.shape[1] - 1)
        return values.flatten(0, 1)[index]

    def at_last_tokens(self, values: Tensor) -> Tensor:
        """Return the value of each sequence's last token, `[batch]`, of values of flat positions; a collective of
        `whole`.
        """
        values = self.whole(values)
        return values.flatten(0, 1)[self.sequence_start + self.batch.lengths - 1]


@dataclass(frozen=True)
class MicrobatchShape:
    """Padded shape of the microbatches of one step.

    Attributes:
        column_multiple: Columns of whole rows are a multiple of this: of the sequence-parallel size, and of the chunks
            that context parallelism cuts them into.
        rows: Rows of every microbatch; 0: as many as it has sequences.
        columns: Columns of every microbatch's whole rows; 0: as many as it needs.
        pixels_per_token: Of a model whose image tokens have positions in time, height and width: height and width of
            the pixels of one; None: positions are those of text.
    """

    column_multiple: int
    rows: int = 0
    columns: int = 0
    place: ContextPlace = ALONE
    pixels_per_token: int | None = None


def common_shape(microbatches: Sequence[TokenBatch], shape: MicrobatchShape, *, packed: bool) -> MicrobatchShape:
    """Return the one shape that fits all: pipeline stages exchange tensors of a fixed shape."""
    if packed:
        columns = max(sum(_segments(batch, shape.place)) for batch in microbatches)
        return replace(shape, rows=1, columns=columns)
    return replace(
        shape,
        rows=max(len(batch) for batch in microbatches),
        columns=max(batch.input_ids.shape[1] for batch in microbatches),
    )


def pad_microbatch(batch: TokenBatch, shape: MicrobatchShape, device: torch.device) -> ModelMicrobatch:
    """Return one row a sequence, padded on the right."""
    rows = max(shape.rows, len(batch))
    columns = round_up(max(shape.columns, batch.input_ids.shape[1]), shape.column_multiple)
    input_ids = torch.zeros(rows, columns, dtype=torch.long)
    input_ids[: len(batch), : batch.input_ids.shape[1]] = batch.input_ids
    lengths = torch.zeros(rows, dtype=torch.long)
    lengths[: len(batch)] = batch.counted_lengths
    positions = torch.arange(columns).expand(rows, columns)
    cut = _CutTo(ContextCut.of([columns], shape.place), device)
    return ModelMicrobatch(
        input_ids=cut(input_ids),
        labels=cut(_next_tokens(input_ids)),
        position_ids=cut(_position_ids(batch, positions, shape.pixels_per_token)),
        offsets=cut(positions),
        padding_mask=cut.mask(positions >= lengths[:, None]),
        packed_seq_params=None,
        sequence_start=torch.arange(len(batch), device=device) * columns,
        batch=batch.for_loss().to(device),
        model_columns={
            name: cut.column(name, column, _padded(column, rows, columns))
            for name, column in batch.columns_for(Destination.MODEL).items()
        }
        | _pixels(batch, device),
        context=cut.on_device(),
    )


def pack_microbatch(batch: TokenBatch, shape: MicrobatchShape, device: torch.device) -> ModelMicrobatch:
    """Return all sequences behind one another in one row; what pads the row is one more, unused sequence."""
    lengths, segments = batch.lengths.tolist(), _segments(batch, shape.place)
    total = sum(segments)
    columns = round_up(max(shape.columns, total), shape.column_multiple)
    input_ids, labels = torch.zeros(1, columns, dtype=torch.long), torch.zeros(1, columns, dtype=torch.long)
    is_padding = torch.ones(1, columns, dtype=torch.bool)
    starts = [0, *accumulate(segments)][:-1]
    for row, (start, length) in enumerate(zip(starts, batch.counted_lengths.tolist(), strict=True)):
        if not length:
            continue  # a filler is padding
        end = start + length
        input_ids[0, start:end] = batch.input_ids[row, :length]
        labels[0, start : end - 1] = batch.input_ids[row, 1:length]
        is_padding[0, start:end] = False
    if columns > total:
        segments.append(columns - total)
    boundaries = to_device(torch.tensor([0, *accumulate(segments)], dtype=torch.int32), device)
    positions = torch.cat([torch.arange(length) for length in segments])[None]
    of_rows = torch.arange(batch.input_ids.shape[1]).expand(batch.input_ids.shape)
    by_row, position_ids = _position_ids(batch, of_rows, shape.pixels_per_token), positions
    if by_row.ndim == 3:
        position_ids = positions.expand(3, 1, columns).clone()
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            position_ids[:, 0, start : start + length] = by_row[:, row, :length]
    cut = _CutTo(ContextCut.of(segments, shape.place), device)
    return ModelMicrobatch(
        input_ids=cut(input_ids),
        labels=cut(labels),
        position_ids=cut(position_ids),
        offsets=cut(positions),
        padding_mask=cut.mask(is_padding),
        packed_seq_params=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            max_seqlen_q=max(segments),
            max_seqlen_kv=max(segments),
        ),
        sequence_start=to_device(torch.tensor(starts), device),
        batch=batch.for_loss().to(device),
        model_columns={
            name: cut.column(name, column, _packed(column, lengths, starts, columns))
            for name, column in batch.columns_for(Destination.MODEL).items()
        }
        | _pixels(batch, device),
        context=cut.on_device(),
    )


def _segments(batch: TokenBatch, place: ContextPlace) -> list[int]:
    """Return the columns of each packed sequence, with the padding that context parallelism needs."""
    return [round_up(length, place.sequence_multiple) for length in batch.lengths.tolist()]


class _CutTo:
    """Cut of whole rows on the host to this rank's columns, which alone go to the device."""

    def __init__(self, cut: ContextCut | None, device: torch.device):
        self._cut, self._device = cut, device

    def __call__(self, values: Tensor) -> Tensor:
        mine = values if self._cut is None else self._cut.part(values)
        return to_device(mine, self._device)

    def mask(self, mask: Tensor) -> Tensor | None:
        return self(mask) if bool(mask.any()) else None

    def column(self, name: str, column: Column, values: Tensor) -> Tensor:
        if name in ON_HOST:
            return values
        return self(values) if column.axis is Axis.TOKEN else to_device(values, self._device)

    def on_device(self) -> ContextCut | None:
        return None if self._cut is None else self._cut.to(self._device)


def _position_ids(batch: TokenBatch, positions: Tensor, pixels_per_token: int | None) -> Tensor:
    """Return the positions that a rotary embedding turns by, one row a sequence."""
    if pixels_per_token is None:
        return positions
    found = positions.expand(3, *positions.shape)
    if IS_IMAGE not in batch.columns:
        return found
    rows, columns = positions.shape
    is_image = torch.zeros(rows, columns, dtype=torch.bool)
    mask = batch.columns[IS_IMAGE].values[:, :columns]
    is_image[: mask.shape[0], : mask.shape[1]] = mask
    sizes = batch.columns[IMAGE_SIZES].values // pixels_per_token
    return image_positions(is_image, [(int(height), int(width)) for height, width in sizes.tolist()])


def _pixels(batch: TokenBatch, device: torch.device) -> dict[str, Tensor]:
    """Return the pixels of the distinct images, where they are at hand."""
    if PIXELS not in batch.shared:
        return {}
    ids = batch.columns[IMAGE_IDS].values.tolist()
    return {PIXELS: to_device(torch.from_numpy(distinct_pixels(batch.shared[PIXELS], ids)), device)}


def _next_tokens(input_ids: Tensor) -> Tensor:
    return torch.nn.functional.pad(input_ids[:, 1:], (0, 1))


def _padded(column: Column, rows: int, columns: int) -> Tensor:
    values = column.values
    if column.axis is Axis.RAGGED:
        return values
    shape = (rows, columns, *values.shape[2:]) if column.axis is Axis.TOKEN else (rows, *values.shape[1:])
    padded = values.new_full(shape, column.fill)
    if column.axis is Axis.TOKEN:
        padded[: values.shape[0], : values.shape[1]] = values
    else:
        padded[: values.shape[0]] = values
    return padded


def _packed(column: Column, lengths: Sequence[int], starts: Sequence[int], columns: int) -> Tensor:
    """Return a column for the model, all sequences behind one another in one row."""
    values = column.values
    if column.axis is not Axis.TOKEN:
        return values
    packed = values.new_full((1, columns, *values.shape[2:]), column.fill)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        packed[0, start : start + length] = values[row, :length]
    return packed
