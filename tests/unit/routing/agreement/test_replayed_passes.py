# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Passes that are joined before they are counted: the same counts as one by one."""

from collections.abc import Sequence

import pytest
import torch

from nemo_rl_moe.routing.agreement.repeated_rows import RepeatedRows
from nemo_rl_moe.routing.agreement.replayed_passes import ReplayedPass, join_passes
from nemo_rl_moe.routing.agreement.statistics import AgreementStatistics
from nemo_rl_moe.routing.replay import UNKNOWN, ReplayRoutes, RoutedTokens, margins, replayed

NUM_LAYERS, NUM_EXPERTS, TOPK, ROWS = 3, 8, 2, 4
LAYERS = torch.tensor([0, 2, 3])


def made_pass(number: int, columns: int, *, replays: bool, with_margins: bool) -> ReplayedPass:
    """Random routes: most are the routers' own, some are another token's, the one before's, or none."""
    generator = torch.Generator().manual_seed(number)
    num_tokens = ROWS * columns
    scores = torch.rand(NUM_LAYERS, num_tokens, NUM_EXPERTS, generator=generator)
    live = scores.topk(TOPK, -1).indices
    capture = live.clone()
    kinds = torch.rand(num_tokens, generator=generator)
    capture[:, kinds < 0.2] = capture.roll(7, 1)[:, kinds < 0.2]
    capture[:, kinds > 0.8] = capture.roll(ROWS, 1)[:, kinds > 0.8]
    capture[:, kinds > 0.95] = UNKNOWN
    routes = ReplayRoutes.of(capture.permute(1, 0, 2), NUM_EXPERTS)
    follows = torch.ones(num_tokens, dtype=torch.bool)
    follows[:ROWS] = False
    seen = [
        RoutedTokens(
            own,
            replayed(own, routes.by_layer()[place]) if replays else own,
            margins(of_layer, TOPK) if with_margins else None,
        )
        for place, (own, of_layer) in enumerate(zip(live, scores, strict=True))
    ]
    fed = torch.rand(num_tokens, generator=generator) < 0.9
    return ReplayedPass({number: num_tokens}, routes, fed, seen, ROWS, follows)


def counts(passes: Sequence[ReplayedPass]) -> list[torch.Tensor]:
    statistics, repeats = AgreementStatistics(5, NUM_EXPERTS, torch.device("cpu")), RepeatedRows(torch.device("cpu"))
    for each in passes:
        live = statistics.add(each.tokens, LAYERS, each.routes, each.fed, each.seen)
        assert live is not None
        repeats.add(each.routes, live, each.fed, each.distance, each.follows)
    marks = [statistics.tokens[number] for number in sorted(statistics.tokens)]
    return [
        statistics.rows,
        statistics.captured_experts,
        statistics.live_experts,
        statistics.margins,
        repeats.counts,
        *marks,
    ]


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("with_margins", [False, True])
def test_joined_passes_count_as_single_ones(replays: bool, with_margins: bool) -> None:
    passes = [
        made_pass(number, columns, replays=replays, with_margins=with_margins)
        for number, columns in ((3, 20), (1, 31), (2, 5))
    ]
    joined = join_passes(passes)
    assert joined.num_entries == sum(each.num_entries for each in passes)
    single, together = counts(passes), counts([joined])
    assert [len(marks) for marks in single[-3:]] == [124, 20, 80]
    assert all(map(torch.equal, single, together))
    assert single[4][0] > 0 < single[0][:, -2:].min(1).values[LAYERS].min(), "nothing is compared"


def test_what_is_taken_stays_the_routers_own_where_nothing_was_replayed() -> None:
    passes = [made_pass(number, 3, replays=False, with_margins=True) for number in range(2)]
    assert all(of_layer.taken is of_layer.live for of_layer in join_passes(passes).seen)
    passes[1] = made_pass(1, 3, replays=True, with_margins=True)
    assert not any(of_layer.taken is of_layer.live for of_layer in join_passes(passes).seen)
