# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Ranges of flattened parameters as boxes: they tile what they stand for, and each rank writes its own alone."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nemo_rl_moe.models.megatron.checkpoint.flat_ranges import Box, boxes_of_range, sharded_range
from tests.support.checkpoint_run import save_once
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import parallel_job, tiny_policy
from tests.support.training_run import RunSettings

# isort: split
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory


def test_a_range_of_a_matrix_by_hand() -> None:
    # Rows of 4: the last two entries of row 0, rows 1 and 2, the first entry of row 3.
    assert list(boxes_of_range((5, 4), 2, 13)) == [Box((0, 2), (1, 2)), Box((1, 0), (2, 4)), Box((3, 0), (1, 1))]


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 2), (2, 1, 3, 2)])
def test_every_range_is_tiled_in_order(shape: tuple[int, ...]) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(whole.numel() + 1), 2):
        boxes = list(boxes_of_range(shape, start, stop))
        entries = [
            entry
            for box in boxes
            for entry in whole[tuple(slice(at, at + size) for at, size in zip(*box, strict=True))].flatten().tolist()
        ]
        assert entries == list(range(start, stop))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


def halves(key: str, data: Tensor, replica: tuple[int, ...], flattened: None) -> list[ShardedTensor]:
    """Gate and up projection of a layer, one above the other in the parameter and two of a rank's rows of each."""
    return [
        ShardedTensor.from_rank_offsets(
            key, half, (0, 1, 3), (1, 2 * number + 1, 4), replica_id=replica, prepend_axis_num=1
        )
        for number, half in enumerate(data.chunk(2))
    ]


def test_pieces_of_a_parameter_that_is_two_in_a_checkpoint() -> None:
    parameter = torch.zeros(4, 3)
    values = torch.arange(8.0)
    pieces = sharded_range(
        ShardedTensorFactory("name", parameter, halves, lambda _: None, (0, 0, 5)),
        2,
        values,
        prefix="moment",
        replica=0,
    )
    # Entries 2 to 10 of a [4, 3] parameter whose rows 0, 1 are rows 2, 3 of a full [3, 8, 3] tensor, and 2, 3 are 6, 7.
    assert [(piece.global_offset, piece.local_shape) for piece in pieces] == [
        ((1, 2, 2), (1, 1, 1)),
        ((1, 3, 0), (1, 1, 3)),
        ((1, 6, 0), (1, 1, 3)),
        ((1, 7, 0), (1, 1, 1)),
    ]
    assert {(piece.key, piece.global_shape, piece.replica_id) for piece in pieces} == {
        ("moment.name", (3, 8, 3), (0, 0, 0))
    }
    for piece in pieces:
        assert piece.data is not None
        piece.data.neg_()
    assert torch.equal(values, -torch.arange(8.0)), "pieces are views"


def test_what_is_no_block_of_its_parameter_is_refused() -> None:
    def transposed(key: str, data: Tensor, replica: tuple[int, ...], flattened: None) -> list[ShardedTensor]:
        return [ShardedTensor.from_rank_offsets(key, data.T.contiguous(), replica_id=replica)]

    factory = ShardedTensorFactory("name", torch.zeros(4, 3), transposed, lambda _: None, (0, 0, 0))
    with pytest.raises(ValueError, match="name: its tensors in a checkpoint are no contiguous blocks of the parameter"):
        sharded_range(factory, 0, torch.zeros(3), prefix="moment", replica=0)


def gloo_groups_beside() -> list[str]:
    with parallel_job(tiny_policy(2)):
        made = {name: value for name, value in vars(parallel_state).items() if name.endswith("_GLOO")}
        assert "_DATA_PARALLEL_GROUP_GLOO" in made
        return [name for name, value in made.items() if value is not None]


def test_no_group_of_gloo_is_made_beside_the_backend_s() -> None:
    assert run_ranks(gloo_groups_beside, 2, fresh=True) == [[], []]


def test_each_rank_writes_its_own_share(tmp_path: Path) -> None:
    """With the optimizer sharded, two ranks of the same experts write as much, where rank 0 would have had it all."""
    zero = {"distributed_data_parallel_config__use_distributed_optimizer": True}
    assert run_ranks(save_once, 2, RunSettings(tiny_policy(2, **zero)), str(tmp_path)) == [None, None]
    sizes = [(tmp_path / f"__{rank}_0.distcp").stat().st_size for rank in range(2)]
    assert max(sizes) < 1.2 * min(sizes)
