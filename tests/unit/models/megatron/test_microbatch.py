# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Padding and packing of microbatches, by hand and for any sequences."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_moe.distributed.batch import TokenBatch, per_sequence
from nemo_rl_moe.models.images import PIXELS, ModelImage, image_inputs
from nemo_rl_moe.models.megatron.training.microbatch import (
    MicrobatchShape,
    ModelMicrobatch,
    common_shape,
    pack_microbatch,
    pad_microbatch,
)
from tests.support.quick_list import examples

CPU = torch.device("cpu")


def batch_of(*sequences: list[int], columns: int | None = None) -> TokenBatch:
    width = columns or max(map(len, sequences))
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    ids = torch.tensor([sequence + [0] * (width - len(sequence)) for sequence in sequences])
    return TokenBatch(ids, lengths, torch.arange(width) < lengths[:, None], tuple(map(str, range(len(sequences)))))


TWO = batch_of([11, 12, 13], [21, 22, 23, 24, 25])


def test_padded_by_hand() -> None:
    made = pad_microbatch(TWO, MicrobatchShape(column_multiple=4), CPU)
    assert made.input_ids.tolist() == [[11, 12, 13, 0, 0, 0, 0, 0], [21, 22, 23, 24, 25, 0, 0, 0]]
    assert made.labels.tolist() == [[12, 13, 0, 0, 0, 0, 0, 0], [22, 23, 24, 25, 0, 0, 0, 0]]
    assert made.position_ids.tolist() == [list(range(8))] * 2
    assert made.padding_mask is not None
    assert made.padding_mask.int().tolist() == [[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1, 1]]
    assert made.packed_seq_params is None
    values = torch.arange(16).view(2, 8)
    assert made.per_sequence(values).tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]


def test_padded_to_a_common_shape_has_whole_rows_of_padding() -> None:
    made = pad_microbatch(TWO, MicrobatchShape(column_multiple=2, rows=3, columns=5), CPU)
    assert made.input_ids.shape == (3, 6)
    assert made.padding_mask is not None
    assert made.padding_mask[2].all()
    assert made.per_sequence(torch.zeros(3, 6)).shape == (2, 4)


def test_packed_by_hand() -> None:
    made = pack_microbatch(TWO, MicrobatchShape(column_multiple=4), CPU)
    assert made.input_ids.tolist() == [[11, 12, 13, 21, 22, 23, 24, 25]]
    assert made.labels.tolist() == [[12, 13, 0, 22, 23, 24, 25, 0]]
    assert made.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert made.padding_mask is None
    assert made.packed_seq_params is not None
    assert made.packed_seq_params.qkv_format == "thd"
    assert made.packed_seq_params.cu_seqlens_q.tolist() == [0, 3, 8]
    assert made.packed_seq_params.cu_seqlens_q.dtype is torch.int32
    assert made.packed_seq_params.max_seqlen_q == 5
    assert made.sequence_start.tolist() == [0, 3]
    targets = made.per_sequence(torch.arange(8)[None])
    assert targets[0, :2].tolist() == [0, 1]
    assert targets[1].tolist() == [3, 4, 5, 6]


def test_what_pads_a_packed_row_is_a_sequence_of_its_own() -> None:
    made = pack_microbatch(TWO, MicrobatchShape(column_multiple=4, rows=1, columns=10), CPU)
    assert made.input_ids.shape == (1, 12)
    assert made.packed_seq_params is not None
    assert made.packed_seq_params.cu_seqlens_kv.tolist() == [0, 3, 8, 12]
    assert made.padding_mask is not None
    assert made.padding_mask[0].int().tolist() == [0] * 8 + [1] * 4
    assert made.position_ids[0, 8:].tolist() == [0, 1, 2, 3]


def test_common_shape() -> None:
    other = batch_of([1, 2], [3], [4])
    assert common_shape([TWO, other], MicrobatchShape(2), packed=False) == MicrobatchShape(2, rows=3, columns=5)
    assert common_shape([TWO, other], MicrobatchShape(2), packed=True) == MicrobatchShape(2, rows=1, columns=8)


def test_columns_follow_their_sequences() -> None:
    batch = TokenBatch(
        TWO.input_ids,
        TWO.lengths,
        TWO.token_mask,
        TWO.sample_ids,
        columns={"advantages": per_sequence(torch.tensor([0.5, -0.5]))},
    )
    made = pack_microbatch(batch, MicrobatchShape(1), CPU)
    assert made.batch.columns["advantages"].values.tolist() == [0.5, -0.5]


@pytest.mark.parametrize("make", [pad_microbatch, pack_microbatch])
def test_what_the_model_reads_goes_to_the_device_once(make: Callable[..., ModelMicrobatch]) -> None:
    images = [ModelImage(np.full((2, 2, 3), number, np.uint8)) for number in range(2)]
    inputs = [image_inputs(own, np.array([True, False])) for own in ([images[0]], [images[1], images[0]])]
    batch = TWO.with_columns(advantages=per_sequence(torch.zeros(2))).with_inputs(inputs)
    made = make(batch, MicrobatchShape(1), CPU)
    assert set(made.batch.columns) == {"advantages"}
    assert not made.batch.shared
    assert made.model_columns.keys() == inputs[0].keys()
    assert made.model_columns[PIXELS].tolist() == [0] * 12 + [1] * 12
    without = make(batch.fetched(list, with_shared=False), MicrobatchShape(1), CPU)
    assert without.model_columns.keys() == inputs[0].keys() - {PIXELS}


@settings(max_examples=examples(60), deadline=None)
@given(
    sequences=st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=9), min_size=1, max_size=5),
    multiple=st.sampled_from([1, 2, 4]),
    extra_columns=st.integers(0, 7),
    packed=st.booleans(),
)
def test_every_target_comes_back_to_its_sequence(
    sequences: list[list[int]], multiple: int, extra_columns: int, packed: bool
) -> None:
    batch = batch_of(*sequences)
    shape = common_shape([batch], MicrobatchShape(multiple), packed=packed)
    shape = MicrobatchShape(multiple, shape.rows, shape.columns + extra_columns)
    made = (pack_microbatch if packed else pad_microbatch)(batch, shape, CPU)
    assert made.input_ids.shape[1] % multiple == 0
    assert made.labels.shape == made.position_ids.shape == made.input_ids.shape
    assert _real_tokens(made) == sorted(token for sequence in sequences for token in sequence)
    tokens, targets = made.per_sequence(made.input_ids), made.per_sequence(made.labels)
    assert targets.shape == (len(sequences), max(map(len, sequences)) - 1)
    for row, sequence in enumerate(sequences):
        count = len(sequence) - 1
        assert tokens[row, :count].tolist() == sequence[:-1]
        assert targets[row, :count].tolist() == sequence[1:]


def _real_tokens(made: ModelMicrobatch) -> list[int]:
    real = made.input_ids if made.padding_mask is None else made.input_ids[~made.padding_mask]
    return sorted(real.reshape(-1).tolist())


@pytest.mark.parametrize("packed", [True, False])
def test_sequences_of_one_token_have_no_target(packed: bool) -> None:
    made = (pack_microbatch if packed else pad_microbatch)(batch_of([5], [6]), MicrobatchShape(1), CPU)
    assert made.per_sequence(made.labels).shape == (2, 0)
