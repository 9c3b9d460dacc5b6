# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""One data-parallel rank whose rows are missing or wrong is named; ranks that differ by chance are not."""

from functools import partial

import numpy as np
import pytest
import torch

from nemo_rl_moe.routing.agreement.rank_rows import SLOTS, missing_in_one_rank, rank_anomalies, rank_name, rows_by_rank
from nemo_rl_moe.routing.agreement.statistics import Row

LAYERS, ROWS = 4, 4000
NAME_OF = partial(rank_name, num_ranks=8)


def by_slot(missing: list[int], same: list[int] | None = None) -> torch.Tensor:
    """Sum over ranks of their slots, of 4,000 rows each."""
    total = torch.zeros(SLOTS, len(Row), dtype=torch.long)
    for rank, lost in enumerate(missing):
        rows = torch.zeros(LAYERS, len(Row), dtype=torch.long)
        rows[:, Row.EXPECTED] = ROWS // LAYERS
        rows[0, Row.MISSING] = lost
        rows[0, Row.USABLE] = ROWS - lost
        rows[0, Row.LIVE_SAME] = ROWS - lost if same is None else same[rank]
        total += rows_by_rank(rows, rank)
    return total


def test_a_rank_that_lacks_its_rows_is_named() -> None:
    found = missing_in_one_rank(by_slot([0, 0, 4000, 40]))
    assert found is not None
    assert (found.slot, found.share, found.of_others) == (2, 1.0, 40 / 12000)


@pytest.mark.parametrize(
    "missing",
    [
        [0, 0, 0],
        [100, 0, 0],  # a fortieth
        [2000, 1800, 2100],  # an engine has died, and with it what it kept for all of them
        [2000, 1400, 0],
        [4000],  # no others to compare with
    ],
)
def test_rows_that_all_lack_or_hardly_any_are_not_one_ranks(missing: list[int]) -> None:
    assert missing_in_one_rank(by_slot(missing)) is None


def test_a_rank_with_the_routes_of_others_is_named() -> None:
    (found,) = rank_anomalies(by_slot([0, 0, 0], [3900, 1200, 3800]), LAYERS, NAME_OF)
    assert found.kind == "rank"
    assert found.text == (
        "data-parallel rank 1 has routes that are not its tokens': its routers would choose them in 0.300 of the rows,"
        " the other ranks' routers theirs in 0.963"
    )


def test_ranks_that_differ_a_little_are_no_anomaly() -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        same = generator.integers(3200, 3900, 8).tolist()
        assert rank_anomalies(by_slot([0] * 8, same), LAYERS, NAME_OF) == []
    assert rank_anomalies(by_slot([0], [100]), LAYERS, NAME_OF) == []


def test_ranks_of_a_large_job_share_slots() -> None:
    assert rank_name(3, SLOTS) == "data-parallel rank 3"
    assert rank_name(3, 3 * SLOTS) == "one of the data-parallel ranks 3, 67, 131"
    slots = by_slot([0] * 70 + [4000])
    found = missing_in_one_rank(slots)
    assert found is not None
    assert (found.slot, found.share) == (70 % SLOTS, 0.5)
