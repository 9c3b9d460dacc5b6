# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""From a microbatch of sequences to the tensors that Megatron-Core's GPTModel takes, padded or packed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from nemo_rl_moe.distributed.batch import Axis, Column, Destination, TokenBatch
from nemo_rl_moe.models.image_positions import image_positions
from nemo_rl_moe.models.images import IS_IMAGE, ON_HOST, PICTURE_SIZES
from nemo_rl_moe.models.megatron import cpu_backend  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core.packed_seq_params import PackedSeqParams


@dataclass(frozen=True)
class ModelMicrobatch:
    """One microbatch as the model takes it. `rows x columns` is `batch x sequence` or, packed, `1 x all tokens`.

    Attributes:
        input_ids: Token ids.
        labels: The token after each position, 0 where there is none.
        position_ids: What the rotary embedding turns by: the position within the sequence or, of a model with positions
            in time, height and width, all three of them, `[3, rows, columns]`.
        offsets: Position within the sequence.
        padding_mask: True on padding; None where there is none.
        packed_seq_params: Where each packed sequence begins; None when padded.
        sequence_start: Flat position of each sequence's first token.
        batch: The sequences themselves, on the device.
        model_columns: The batch's columns for the model: `[rows, columns, ...]` on the token axis, with the column's
            fill value on padding; `[rows, ...]` or, packed, `[sequences, ...]` on the sequence axis; where ragged, all
            sequences' values behind one another. Sizes and digests of pictures are on the host.
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

    def per_sequence(self, values: Tensor) -> Tensor:
        """Brings values of flat positions back to one row a sequence.

        Args:
            values: [rows, columns], one value for each target.

        Returns:
            [batch, longest - 1]; entries beyond a sequence's length are those of other positions and must be masked.
        """
        longest = self.batch.input_ids.shape[1]
        if self.packed_seq_params is None:
            return values[: len(self.batch), : longest - 1]
        offsets = torch.arange(longest - 1, device=values.device)
        index = (self.sequence_start[:, None] + offsets).clamp_(max=values.numel() - 1)
        return values.reshape(-1)[index]


@dataclass(frozen=True)
class MicrobatchShape:
    """Padded shape of the microbatches of one step.

    Attributes:
        column_multiple: Columns are a multiple of this (the sequence-parallel size).
        rows: Rows of every microbatch; 0: as many as it has sequences.
        columns: Columns of every microbatch; 0: as many as it needs.
        pixels_per_token: Of a model whose image tokens have positions in time, height and width: height and width of
            the pixels of one; None: positions are those of text.
    """

    column_multiple: int
    rows: int = 0
    columns: int = 0
    pixels_per_token: int | None = None


def common_shape(microbatches: Sequence[TokenBatch], shape: MicrobatchShape, *, packed: bool) -> MicrobatchShape:
    """The one shape that fits all: pipeline stages exchange tensors of a fixed shape."""
    if packed:
        return replace(shape, rows=1, columns=max(int(batch.lengths.sum()) for batch in microbatches))
    return replace(
        shape,
        rows=max(len(batch) for batch in microbatches),
        columns=max(batch.input_ids.shape[1] for batch in microbatches),
    )


def pad_microbatch(batch: TokenBatch, shape: MicrobatchShape, device: torch.device) -> ModelMicrobatch:
    """One row a sequence, padded on the right."""
    rows = max(shape.rows, len(batch))
    columns = _round_up(max(shape.columns, batch.input_ids.shape[1]), shape.column_multiple)
    input_ids = torch.zeros(rows, columns, dtype=torch.long)
    input_ids[: len(batch), : batch.input_ids.shape[1]] = batch.input_ids
    lengths = torch.zeros(rows, dtype=torch.long)
    lengths[: len(batch)] = batch.lengths
    positions = torch.arange(columns).expand(rows, columns)
    return ModelMicrobatch(
        input_ids=input_ids.to(device, non_blocking=True),
        labels=_next_tokens(input_ids).to(device, non_blocking=True),
        position_ids=_position_ids(batch, positions, shape.pixels_per_token).to(device, non_blocking=True),
        offsets=positions.to(device, non_blocking=True),
        padding_mask=_mask_or_none(positions >= lengths[:, None], device),
        packed_seq_params=None,
        sequence_start=torch.arange(len(batch), device=device) * columns,
        batch=batch.to(device),
        model_columns={
            name: _on_its_device(name, _padded(column, rows, columns), device)
            for name, column in batch.columns_for(Destination.MODEL).items()
        },
    )


def pack_microbatch(batch: TokenBatch, shape: MicrobatchShape, device: torch.device) -> ModelMicrobatch:
    """All sequences behind one another in one row; what pads the row is one more, unused sequence."""
    lengths = batch.lengths.tolist()
    total = sum(lengths)
    columns = _round_up(max(shape.columns, total), shape.column_multiple)
    segments = [*lengths, columns - total] if columns > total else lengths
    input_ids, labels = torch.zeros(1, columns, dtype=torch.long), torch.zeros(1, columns, dtype=torch.long)
    starts = [0]
    for row, length in enumerate(lengths):
        start, end = starts[-1], starts[-1] + length
        input_ids[0, start:end] = batch.input_ids[row, :length]
        labels[0, start : end - 1] = batch.input_ids[row, 1:length]
        starts.append(end)
    boundaries = torch.tensor([0, *torch.tensor(segments).cumsum(0).tolist()], dtype=torch.int32, device=device)
    positions = torch.cat([torch.arange(length) for length in segments])[None]
    of_rows = torch.arange(batch.input_ids.shape[1]).expand(batch.input_ids.shape)
    by_row = _position_ids(batch, of_rows, shape.pixels_per_token)
    position_ids = positions
    if by_row.ndim == 3:
        position_ids = positions.expand(3, 1, columns).clone()
        for row, (start, length) in enumerate(zip(starts, lengths, strict=False)):
            position_ids[:, 0, start : start + length] = by_row[:, row, :length]
    return ModelMicrobatch(
        input_ids=input_ids.to(device, non_blocking=True),
        labels=labels.to(device, non_blocking=True),
        position_ids=position_ids.to(device, non_blocking=True),
        offsets=positions.to(device, non_blocking=True),
        padding_mask=_mask_or_none(torch.arange(columns)[None] >= total, device),
        packed_seq_params=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            max_seqlen_q=max(segments),
            max_seqlen_kv=max(segments),
        ),
        sequence_start=torch.tensor(starts[:-1], device=device),
        batch=batch.to(device),
        model_columns={
            name: _on_its_device(name, _packed(column, lengths, columns), device)
            for name, column in batch.columns_for(Destination.MODEL).items()
        },
    )


def _position_ids(batch: TokenBatch, positions: Tensor, pixels_per_token: int | None) -> Tensor:
    """What a rotary embedding turns by: of sequences one a row, which may be more rows than the batch has.

    Args:
        batch: The sequences, on the host.
        positions: Position within the sequence, `[rows, columns]`.
        pixels_per_token: Of `MicrobatchShape`.
    """
    if pixels_per_token is None:
        return positions
    found = positions.expand(3, *positions.shape)
    if IS_IMAGE not in batch.columns:
        return found
    rows, columns = positions.shape
    is_image = torch.zeros(rows, columns, dtype=torch.bool)
    mask = batch.columns[IS_IMAGE].values[:, :columns]
    is_image[: mask.shape[0], : mask.shape[1]] = mask
    sizes = batch.columns[PICTURE_SIZES].values // pixels_per_token
    return image_positions(is_image, [(int(height), int(width)) for height, width in sizes.tolist()])


def _on_its_device(name: str, values: Tensor, device: torch.device) -> Tensor:
    """A column where it is read: small ones that say how much there is of others stay on the host, for nobody waits."""
    return values if name in ON_HOST else values.to(device, non_blocking=True)


def _next_tokens(input_ids: Tensor) -> Tensor:
    return torch.nn.functional.pad(input_ids[:, 1:], (0, 1))


def _mask_or_none(mask: Tensor, device: torch.device) -> Tensor | None:
    return mask.to(device, non_blocking=True) if bool(mask.any()) else None


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _padded(column: Column, rows: int, columns: int) -> Tensor:
    """A column for the model, one row a sequence."""
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


def _packed(column: Column, lengths: Sequence[int], columns: int) -> Tensor:
    """A column for the model, all sequences behind one another in one row."""
    values = column.values
    if column.axis is not Axis.TOKEN:
        return values
    packed = values.new_full((1, columns, *values.shape[2:]), column.fill)
    start = 0
    for row, length in enumerate(lengths):
        packed[0, start : start + length] = values[row, :length]
        start += length
    return packed
