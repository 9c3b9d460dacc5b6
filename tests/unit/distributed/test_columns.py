# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Columns of a batch follow their sequences by the axis that they state, whatever their shape looks like."""

import numpy as np
import pytest
import torch

from nemo_rl_moe.distributed.batch import (
    Axis,
    Column,
    Destination,
    ModelInput,
    TokenBatch,
    append_fillers,
    collate_inputs,
    per_sequence,
    per_token,
)


def batch(**columns: Column) -> TokenBatch:
    """Four sequences of up to four tokens: as many sequences as columns, so that shapes alone report nothing."""
    ids = torch.arange(16).view(4, 4)
    mask = torch.ones(4, 4, dtype=torch.bool)
    return TokenBatch(ids, torch.tensor([4, 2, 3, 1]), mask, ("a", "b", "c", "d"), columns)


def test_a_square_column_of_sequences_is_not_taken_for_one_of_tokens() -> None:
    square = torch.arange(16).view(4, 4)
    made = batch(table=per_sequence(square), tokens=per_token(square)).select([1, 3])
    assert made.input_ids.shape == (2, 2)
    assert made.columns["table"].values.tolist() == [[4, 5, 6, 7], [12, 13, 14, 15]]
    assert made.columns["tokens"].values.tolist() == [[4, 5], [12, 13]]


def test_further_dimensions_stay() -> None:
    routes = torch.arange(4 * 4 * 3 * 2, dtype=torch.int16).view(4, 4, 3, 2)
    made = batch(routed_experts=per_token(routes, Destination.MODEL, fill=-1)).select([2, 0])
    assert torch.equal(made.columns["routed_experts"].values, routes[[2, 0], :4])
    assert made.columns["routed_experts"].fill == -1


def test_ragged_values_go_with_their_sequences() -> None:
    patches = Column(torch.arange(6.0), Axis.RAGGED, Destination.MODEL, torch.tensor([2, 0, 3, 1]))
    made = batch(patches=patches)
    chosen = made.select([2, 0]).columns["patches"]
    assert chosen.values.tolist() == [2, 3, 4, 0, 1]
    assert chosen.sizes is not None
    assert chosen.sizes.tolist() == [3, 2]
    assert made.select([1]).columns["patches"].values.shape == (0,)
    assert append_fillers(made, [3]).columns["patches"].values.tolist() == [0, 1, 2, 3, 4, 5, 5]


def test_sizes_belong_to_ragged_columns_alone() -> None:
    with pytest.raises(ValueError, match="axis token"):
        Column(torch.zeros(2, 2), Axis.TOKEN, sizes=torch.ones(2))
    with pytest.raises(ValueError, match="axis ragged"):
        Column(torch.zeros(2), Axis.RAGGED)


def test_readers_get_their_columns_alone() -> None:
    made = batch(image=per_sequence(torch.zeros(4), Destination.MODEL), advantages=per_sequence(torch.zeros(4)))
    assert set(made.columns_for(Destination.MODEL)) == {"image"}
    assert set(made.columns_for(Destination.LOSS)) == {"advantages"}


def test_targets_leave_out_the_first_token() -> None:
    values = torch.arange(8).view(2, 4)
    assert per_token(values).of_targets().values.tolist() == [[1, 2, 3], [5, 6, 7]]
    assert per_sequence(values).of_targets().values is values


def test_inputs_of_sequences_become_one_column() -> None:
    tokens = [ModelInput(np.array([1, 2, 3]), Axis.TOKEN, fill=-1), ModelInput(np.array([4]), Axis.TOKEN, fill=-1)]
    column = collate_inputs(tokens, longest=4)
    assert column.values.tolist() == [[1, 2, 3, -1], [4, -1, -1, -1]]
    assert (column.axis, column.goes_to, column.fill) == (Axis.TOKEN, Destination.MODEL, -1)
    ragged = collate_inputs([ModelInput(np.ones((2, 3)), Axis.RAGGED), ModelInput(np.zeros((1, 3)), Axis.RAGGED)], 4)
    assert ragged.values.shape == (3, 3)
    assert ragged.sizes is not None
    assert ragged.sizes.tolist() == [2, 1]
    with pytest.raises(ValueError, match="same axis"):
        collate_inputs([tokens[0], ModelInput(np.zeros(2), Axis.SEQUENCE)], 4)
    with pytest.raises(ValueError, match="with_inputs"):
        collate_inputs([ModelInput((np.zeros(2),), Axis.SHARED)], 4)
