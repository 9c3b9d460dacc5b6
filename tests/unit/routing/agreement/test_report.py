# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The report of a step's capture: what counts as two passes with the same weights."""

import pytest
import torch

from nemo_rl_moe.routing.agreement.rank_rows import rows_by_rank
from nemo_rl_moe.routing.agreement.report import CheckTotals
from nemo_rl_moe.routing.agreement.row_kinds import Row
from nemo_rl_moe.token_lag import LAG_CLASSES

FLIPS = "routing/float32_flips_share"


@pytest.mark.parametrize(
    ("rows_by_lag", "reported"),
    [(None, True), ({}, True), ({"0": 40}, True), ({"0": 20, "1": 20}, False), ({"5_or_more": 40}, False)],
)
def test_rows_of_older_weights_are_no_flips_of_float32(rows_by_lag: dict[str, int] | None, *, reported: bool) -> None:
    rows = torch.zeros(1, len(Row), dtype=torch.long)
    rows[0, [Row.EXPECTED, Row.USABLE, Row.LIVE_SAME]] = torch.tensor([40, 40, 38])
    of_classes = None
    if rows_by_lag is not None:
        of_classes = torch.tensor([[rows_by_lag.get(name, 0)] * 2 for name in LAG_CLASSES])
    totals = CheckTotals(torch.zeros(3, dtype=torch.long), rows, num_ranks=1, is_exact=True, by_lag=of_classes)
    assert totals.metrics().get(FLIPS) == (0.05 if reported else None)


@pytest.mark.parametrize(("newest", "older", "num_found"), [(8000, 0, 1), (4000, 4000, 0), (0, 8000, 0)])
def test_a_rank_with_most_of_the_older_rows_is_not_one_with_the_routes_of_others(
    newest: int, older: int, num_found: int
) -> None:
    rows = torch.zeros(1, len(Row), dtype=torch.long)
    rows[0, [Row.EXPECTED, Row.USABLE, Row.LIVE_SAME]] = 4000
    moved = rows.clone()
    moved[0, Row.LIVE_SAME] = 3000
    by_slot = rows_by_rank(moved, 0) + rows_by_rank(rows, 1)
    of_classes = torch.tensor([[newest, newest], [older, older], *[[0, 0]] * (len(LAG_CLASSES) - 2)])
    totals = CheckTotals(torch.zeros(3, dtype=torch.long), by_slot, num_ranks=2, is_exact=False, by_lag=of_classes)
    found = totals.anomalies(num_layers=1)
    assert len(found) == num_found
    assert all("data-parallel rank 0 has routes that are not its tokens'" in each.text for each in found)
