# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversion of a microbatch of sequences to the inputs of Megatron-Core's GPTModel, padded or packed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int, Shaped
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from nemo_rl_moe.distributed.batch import Axis, Column, Destination, TokenBatch, to_device
from nemo_rl_moe.distributed.bin_packing import round_up
from nemo_rl_moe.models.image_positions import image_positions
from nemo_rl_moe.models.images import IMAGE_IDS, IMAGE_SIZES, IS_IMAGE, ON_HOST, PIXELS, distinct_pixels
from nemo_rl_moe.models.megatron.training.context_parallel import ALONE, ContextCut, ContextPlace
from nemo_rl_moe.models.megatron.training.prefix_tree import PrefixTree, TreeSeqParams
from nemo_rl_moe.routing.replay import ROUTED_EXPERTS, UNKNOWN


class SequenceCut(NamedTuple):
    """Block of a microbatch's columns that a rank's routers see: block `rank` of `size` under sequence parallelism."""

    rank: int
    size: int


def in_router_order(values: Int[Tensor, "rows columns ..."], cut: SequenceCut) -> Int[Tensor, "tokens ..."]:
    """Return the values of a rank's tokens in its routers' order: all rows of a column, then of the next column."""
    by_column = values.transpose(0, 1)
    if cut.size > 1:
        by_column = by_column.chunk(cut.size)[cut.rank]
    return by_column.flatten(0, 1)


@dataclass
class HostSeqParams(PackedSeqParams):
    """Boundaries of packed sequences, on the host too. Megatron-Core takes the fields of the base class."""

    bounds_on_host: Sequence[int] | None = None


class Copies(NamedTuple):
    """Tokens of packed sequences whose token of the prefix tree is in a rank's block.

    Attributes:
        positions: Flat position of each token in the packed row.
        source: Index of its token in the block.
    """

    positions: Int[Tensor, " copies"]
    source: Int[Tensor, " copies"]


@dataclass(frozen=True)
class SharedLayout:
    """Inputs of the model if sequences share prefixes: one row in which each distinct token occurs once.

    Outputs for a target are at the target itself, since several targets may follow one token.

    Attributes:
        labels: The token at each position, which is the target of the token's predecessor.
        padding_mask: True on padding. None without padding.
        model_columns: As in `ModelMicrobatch`, with the values of the first sequence that has a token.
        as_inputs: `[columns]`, token of the row for each position of the packed sequences, 0 on padding.
        as_targets: `[columns]`, token of the row for the target after each position. No meaning after the last token.
    """

    tree: PrefixTree
    input_ids: Int[Tensor, "1 tree"]
    labels: Int[Tensor, "1 tree"]
    position_ids: Int[Tensor, "1 tree"]
    padding_mask: Bool[Tensor, "1 tree"] | None
    packed_seq_params: TreeSeqParams
    model_columns: Mapping[str, Tensor]
    as_inputs: Int[Tensor, " columns"]
    as_targets: Int[Tensor, " columns"]
    _copies: dict[SequenceCut, Copies] = field(default_factory=dict)

    def copies_of(self, cut: SequenceCut) -> Copies:
        """Return the tokens of the sequences that a rank's routers see, in the order of the packed row."""
        if cut not in self._copies:
            size = self.input_ids.shape[1] // cut.size
            found = (torch.from_numpy(each) for each in self.tree.copies_of_block(cut.rank, size))
            self._copies[cut] = Copies(*(to_device(each, self.input_ids.device) for each in found))
        return self._copies[cut]


@dataclass(frozen=True)
class ModelMicrobatch:
    """One microbatch in the model's layout. `rows x columns` is `batch x sequence`, or `1 x all tokens` if packed.

    With context parallelism the model's tensors have only this rank's columns (`context`). Other attributes, such as
    `sequence_start`, refer to full rows.

    Attributes:
        labels: The token after each position, 0 if there is none.
        position_ids: Positions for the rotary embedding, within the sequence. For a model with positions in time,
            height and width, `[3, rows, columns]`.
        offsets: Position of each token within its sequence.
        padding_mask: True on padding. None without padding.
        packed_seq_params: Boundaries of packed sequences. None if sequences are padded.
        sequence_start: Flat position of each sequence's first token.
        batch: The sequences with the columns for the loss, on the device.
        model_columns: Name -> column of the batch for the model. A column with a value per token becomes
            `[rows, columns, ...]`, with the column's fill value on padding. A column with a value per sequence becomes
            `[rows, ...]`, or `[sequences, ...]` if packed. A ragged column, with any number of values per sequence, has
            the values of all sequences in order. `models.images` describes the pixels.
        shared: The model's inputs if the sequences share prefixes. All other attributes describe separate sequences.
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
    shared: SharedLayout | None = None

    @property
    def inputs(self) -> "ModelMicrobatch | SharedLayout":
        """The model's inputs: this microbatch, or its layout with shared prefixes."""
        return self.shared or self

    @property
    def num_columns(self) -> int:
        return self.input_ids.shape[1] if self.context is None else len(self.context.order)

    def in_router_order(self, values: Shaped[Tensor, "rows columns ..."], cut: SequenceCut) -> Tensor:
        """Return the values of the tokens that a rank's routers see, in their order, `[tokens, ...]`.

        If sequences share tokens, the result has a value for each copy of a token, in the order of the packed row.
        """
        if self.shared is None:
            return in_router_order(values, cut)
        return values.flatten(0, 1)[self.shared.copies_of(cut).positions]

    def router_index(self, positions: Int[Tensor, "..."], cut: SequenceCut) -> Int[Tensor, "..."]:
        """Return the index of tokens in `in_router_order`, outside of its range if the rank's routers do not see them.

        Args:
            positions: Flat positions in full rows.
        """
        if self.shared is not None:
            copies = self.shared.copies_of(cut).positions
            index = positions.new_full((self.input_ids.numel(),), -1)
            index[copies] = torch.arange(len(copies), device=index.device)
            return index[positions.clamp(max=len(index) - 1)]
        row, column = positions // self.num_columns, self.local_columns(positions % self.num_columns)
        return column * self.input_ids.shape[0] + row - cut.rank * (self.input_ids.numel() // cut.size)

    def of_inputs(self, values: Shaped[Tensor, "rows model_columns ..."]) -> Shaped[Tensor, "rows columns ..."]:
        """Return a model's outputs, one for each input token, in the layout of `input_ids`."""
        return values if self.shared is None else values[:, self.shared.as_inputs]

    def of_targets(self, values: Shaped[Tensor, "rows model_columns ..."]) -> Shaped[Tensor, "rows columns ..."]:
        """Return a model's outputs, one for each target, in the layout of `labels`."""
        return values if self.shared is None else values[:, self.shared.as_targets]

    def part(self, values: Shaped[Tensor, "rows all_columns ..."]) -> Shaped[Tensor, "rows columns ..."]:
        """Select this rank's columns of full rows."""
        return values if self.context is None else self.context.part(values)

    def whole(self, values: Shaped[Tensor, "rows columns ..."]) -> Shaped[Tensor, "rows all_columns ..."]:
        """Return full rows. With context parallelism this is a collective of the ranks that share the rows."""
        return values if self.context is None else self.context.whole(values)

    def local_columns(self, columns: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Return this rank's index of each column of the full rows, or -1 if the rank does not have the column."""
        return columns if self.context is None else self.context.local[columns]

    def at_tokens(
        self, values: Shaped[Tensor, "batch tokens"], counts: Bool[Tensor, "batch tokens"], other: Any
    ) -> Shaped[Tensor, "rows columns"]:
        """Return values in the layout of `input_ids`.

        Args:
            values: Values of the first `tokens` tokens of each of the `batch` sequences.
            counts: Whether each value is used.
            other: Value of all other positions.
        """
        rows, columns = self.input_ids.shape[0], self.num_columns
        if self.packed_seq_params is None:  # sequences are rows: fewer operations
            found = torch.full((rows, columns), other, dtype=values.dtype, device=values.device)
            found[: len(values), : values.shape[1]] = values.where(counts, other)
            return self.part(found)
        # One additional position at the end receives the values that do not count.
        flat = torch.full((rows * columns + 1,), other, dtype=values.dtype, device=values.device)
        index = self.sequence_start[:, None] + torch.arange(values.shape[1], device=values.device)
        flat.scatter_(0, index.where(counts, len(flat) - 1).reshape(-1), values.reshape(-1))
        return self.part(flat[:-1].view(rows, columns))

    def per_sequence(self, values: Tensor) -> Tensor:
        """Return a row for each sequence with the values of its targets, `[batch, longest - 1, ...]`.

        With context parallelism this is a collective of the ranks that share the rows.

        Entries beyond a sequence's length belong to other positions and must be masked.
        """
        values = self.whole(values)
        longest = self.batch.input_ids.shape[1]
        if self.packed_seq_params is None:
            return values[: len(self.batch), : longest - 1]
        offsets = torch.arange(longest - 1, device=values.device)
        index = (self.sequence_start[:, None] + offsets).clamp_(max=values.shape[0] * values.shape[1] - 1)
        return values.flatten(0, 1)[index]

    def at_last_tokens(self, values: Tensor) -> Tensor:
        """Return the value of each sequence's last token, `[batch]`. A collective with context parallelism."""
        return self.whole(values).flatten(0, 1)[self.sequence_start + self.batch.lengths - 1]


def first_tokens(lengths: Int[Tensor, " batch"], columns: int) -> Bool[Tensor, "batch columns"]:
    """Return True for the first `lengths` of `columns` tokens."""
    return torch.arange(columns, device=lengths.device) < lengths[:, None]


@dataclass(frozen=True)
class MicrobatchShape:
    """Padded shape of the microbatches of one step.

    Attributes:
        column_multiple: Full rows have a multiple of this number of columns. It is a multiple of the sequence-parallel
            size and of the number of context-parallel chunks.
        rows: Minimum number of rows.
        columns: Minimum number of columns of full rows.
        pixels_per_token: Height and width in pixels of an image token, if image tokens have positions in time, height
            and width. Otherwise None.
    """

    column_multiple: int
    rows: int = 0
    columns: int = 0
    place: ContextPlace = ALONE
    pixels_per_token: int | None = None


def common_shape(microbatches: Sequence[TokenBatch], shape: MicrobatchShape, *, packed: bool) -> MicrobatchShape:
    """Return one shape for all microbatches, because pipeline stages exchange tensors of a fixed shape."""
    if packed:
        columns = max(
            _tree_of(batch, batch.lengths.tolist()).num_tokens
            if batch.shares_prefixes
            else sum(_segments(batch, shape.place))
            for batch in microbatches
        )
        return replace(shape, rows=1, columns=columns)
    return replace(
        shape,
        rows=max(len(batch) for batch in microbatches),
        columns=max(batch.input_ids.shape[1] for batch in microbatches),
    )


def pad_microbatch(batch: TokenBatch, shape: MicrobatchShape, device: torch.device) -> ModelMicrobatch:
    """Return one row per sequence, padded on the right."""
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
        labels=cut(torch.nn.functional.pad(input_ids[:, 1:], (0, 1))),
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
    """Return all sequences concatenated in one row. Padding at the row's end is an additional, unused sequence."""
    lengths, segments = batch.lengths.tolist(), _segments(batch, shape.place)
    total = sum(segments)
    tree = _tree_of(batch, lengths) if batch.shares_prefixes else None
    columns = total if tree is not None else round_up(max(shape.columns, total), shape.column_multiple)
    input_ids, labels = torch.zeros(1, columns, dtype=torch.long), torch.zeros(1, columns, dtype=torch.long)
    is_padding = torch.ones(1, columns, dtype=torch.bool)
    starts = [0, *accumulate(segments)][:-1]
    for row, (start, length) in enumerate(zip(starts, batch.counted_lengths.tolist(), strict=True)):
        if not length:
            continue  # a filler sequence is padding
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
    model_columns = {
        name: (column, _packed(column, lengths, starts, columns))
        for name, column in batch.columns_for(Destination.MODEL).items()
    }
    return ModelMicrobatch(
        input_ids=cut(input_ids),
        labels=cut(labels),
        position_ids=cut(position_ids),
        offsets=cut(positions),
        padding_mask=cut.mask(is_padding),
        packed_seq_params=HostSeqParams(
            qkv_format="thd",
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            max_seqlen_q=max(segments),
            max_seqlen_kv=max(segments),
            bounds_on_host=[0, *accumulate(segments)],
        ),
        sequence_start=to_device(torch.tensor(starts), device),
        batch=batch.for_loss().to(device),
        model_columns={name: cut.column(name, *column) for name, column in model_columns.items()}
        | _pixels(batch, device),
        context=cut.on_device(),
        shared=None if tree is None else _shared_layout(tree, input_ids, model_columns, shape, device),
    )


def _tree_of(batch: TokenBatch, lengths: Sequence[int]) -> PrefixTree:
    """Return the prefix tree of packed sequences.

    Tokens are equal if their ids and all their columns for the model are. Before a sequence's first trained token, the
    replayed experts of the first sequence apply to all.
    """
    trained = batch.token_mask.cumsum(1) > 0
    columns = [batch.input_ids.numpy()]
    for name, column in batch.columns_for(Destination.MODEL).items():
        if column.axis is Axis.TOKEN:
            values = column.values
            if name == ROUTED_EXPERTS:
                values = values.where(trained.view(*trained.shape, *(1,) * (values.ndim - 2)), UNKNOWN)
            columns.append(values.numpy())
    counted = batch.counted_lengths.tolist()
    flat = [
        np.concatenate([column[row, :length] for row, length in enumerate(lengths)] or [column[0, :0]])
        for column in columns
    ]
    return PrefixTree.of(flat, [0, *accumulate(lengths)][:-1], counted)


def _shared_layout(
    tree: PrefixTree,
    input_ids: Int[Tensor, "1 columns"],
    model_columns: Mapping[str, tuple[Column, Tensor]],
    shape: MicrobatchShape,
    device: torch.device,
) -> SharedLayout:
    size = round_up(max(shape.columns, tree.num_tokens), shape.column_multiple)
    padding = size - tree.num_tokens

    def in_row(values: Tensor, fill: float = 0) -> Tensor:
        found = values.new_full((1, size, *values.shape[1:]), fill)
        found[0, : tree.num_tokens] = values
        return to_device(found, device)

    owner = torch.from_numpy(tree.owner)
    predecessors = np.concatenate([tree.predecessors(), np.arange(tree.num_tokens, size)])
    as_inputs = torch.zeros(input_ids.shape[1], dtype=torch.long)
    as_inputs[torch.from_numpy(tree.copies)] = torch.from_numpy(tree.source)
    ids, position_ids = in_row(input_ids[0, owner]), in_row(torch.from_numpy(tree.positions()))
    # For the rotary embedding, the row is a single sequence, whose angles follow `position_ids`.
    bounds = to_device(torch.tensor([0, size], dtype=torch.int32), device)
    longest = max((depth + length for depth, length in zip(tree.depths, tree.lengths, strict=True)), default=1)
    return SharedLayout(
        tree=tree,
        input_ids=ids,
        labels=ids,
        position_ids=position_ids,
        padding_mask=in_row(torch.zeros(tree.num_tokens, dtype=torch.bool), True) if padding else None,
        packed_seq_params=TreeSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            tree=tree,
            position_ids=position_ids[0],
            predecessors=to_device(torch.from_numpy(predecessors), device),
        ),
        model_columns={
            name: in_row(values[0, owner], column.fill) if column.axis is Axis.TOKEN else to_device(values, device)
            for name, (column, values) in model_columns.items()
        },
        as_inputs=to_device(as_inputs, device),
        as_targets=to_device(as_inputs.roll(-1), device),
    )


def _segments(batch: TokenBatch, place: ContextPlace) -> list[int]:
    """Return the number of columns of each packed sequence, including padding for context parallelism."""
    return [round_up(length, place.sequence_multiple) for length in batch.lengths.tolist()]


class _CutTo:
    """Function that selects this rank's columns of full rows on the host, and copies them to the device."""

    def __init__(self, cut: ContextCut | None, device: torch.device):
        self._cut, self._device = cut, device

    def __call__(self, values: Tensor) -> Tensor:
        return to_device(values if self._cut is None else self._cut.part(values), self._device)

    def mask(self, mask: Tensor) -> Tensor | None:
        return self(mask) if bool(mask.any()) else None

    def column(self, name: str, column: Column, values: Tensor) -> Tensor:
        if name in ON_HOST:
            return values
        return self(values) if column.axis is Axis.TOKEN else to_device(values, self._device)

    def on_device(self) -> ContextCut | None:
        return None if self._cut is None else self._cut.to(self._device)


def _position_ids(batch: TokenBatch, positions: Tensor, pixels_per_token: int | None) -> Tensor:
    """Return the positions for the rotary embedding, one row per sequence."""
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
    """Return the pixels of the distinct images, if the batch has pixels."""
    if PIXELS not in batch.shared:
        return {}
    ids = batch.columns[IMAGE_IDS].values.tolist()
    return {PIXELS: to_device(torch.from_numpy(distinct_pixels(batch.shared[PIXELS], ids)), device)}


def _padded(column: Column, rows: int, columns: int) -> Tensor:
    values = column.values
    if column.axis is Axis.RAGGED:
        return values
    if column.axis is Axis.TOKEN:
        padded = values.new_full((rows, columns, *values.shape[2:]), column.fill)
        padded[: values.shape[0], : values.shape[1]] = values
    else:
        padded = values.new_full((rows, *values.shape[1:]), column.fill)
        padded[: values.shape[0]] = values
    return padded


def _packed(column: Column, lengths: Sequence[int], starts: Sequence[int], columns: int) -> Tensor:
    values = column.values
    if column.axis is not Axis.TOKEN:
        return values
    packed = values.new_full((1, columns, *values.shape[2:]), column.fill)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        packed[0, start : start + length] = values[row, :length]
    return packed
