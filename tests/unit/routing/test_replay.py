# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Replayed choices, rows of a capture and counts of the agreement statistics against hand-worked values and brute
force."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nemo_rl_moe.routing.agreement.statistics import (
    AgreementStatistics,
    Row,
    agreement_metrics,
    classify_rows,
    row_anomalies,
    slot_chance,
)
from nemo_rl_moe.routing.replay import (
    ReplayRoutes,
    RoutedTokens,
    RouterHook,
    group_limited_margins,
    in_planes,
    margins,
    num_in_common,
    replayed,
)

LIVE = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7], [1, 0]])


def plain_topk(scores: torch.Tensor, topk: int, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return scores.topk(topk, dim=-1)


@pytest.mark.parametrize("experts", [255, 256, 384])
@given(data=st.data())
def test_rows_of_many_experts_are_taken_and_compared_as_by_a_walk_over_them(experts: int, data: st.DataObject) -> None:
    """Planes have 8 bits up to 255 experts: no number beyond them may be taken for another one."""
    near = st.sampled_from([-2, -1, 0, 1, 127, 128, 254, 255, 256, 257, experts - 1, experts, 2 * experts])
    capture = data.draw(st.lists(st.tuples(near, near), min_size=1, max_size=6))
    chosen = st.lists(near.filter(lambda expert: 0 <= expert < experts), min_size=2, max_size=2, unique=True)
    live = data.draw(st.lists(chosen, min_size=len(capture), max_size=len(capture)))
    routes = ReplayRoutes.of(torch.tensor(capture, dtype=torch.int16)[:, None], experts)
    found = replayed(torch.tensor(live), routes.by_layer()[0]).tolist()
    planes = in_planes(torch.tensor(live)[:, None], experts)
    assert planes.dtype == routes.planes.dtype
    common = num_in_common(routes.planes, planes)[0].tolist()
    for row, (captured, own) in enumerate(zip(capture, live, strict=True)):
        usable = len(set(captured)) == 2 and all(0 <= expert < experts for expert in captured)
        assert bool(routes.usable[0, row]) == usable
        assert bool(routes.unknown[0, row]) == (captured == (-1, -1))
        assert found[row] == (list(captured) if usable and set(captured) != set(own) else own)
        if usable:
            assert common[row] == len(set(captured) & set(own))


@pytest.mark.parametrize("topk", [1, 2, 4])
@given(data=st.data())
def test_kinds_of_rows_are_those_of_a_walk_over_them(topk: int, data: st.DataObject) -> None:
    experts = 5
    row = st.lists(st.integers(-2, experts), min_size=topk, max_size=topk)
    rows = data.draw(st.lists(row, min_size=1, max_size=8))
    fed = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    found = classify_rows(ReplayRoutes.of(torch.tensor(rows), experts), torch.tensor(fed))
    for place, (numbers, is_fed) in enumerate(zip(rows, fed, strict=True)):
        kinds = {kind for kind, mask in found.items() if mask[place]} - {Row.EXPECTED}
        in_range = all(0 <= number < experts for number in numbers)
        if in_range and len(set(numbers)) == topk:
            assert kinds == {Row.USABLE if is_fed else Row.UNEXPECTED}
        elif not is_fed:
            assert kinds == set()
        elif all(number == -1 for number in numbers):
            assert kinds == {Row.MISSING}
        elif not in_range:
            assert kinds == {Row.OUT_OF_RANGE}
        else:
            assert kinds == {Row.ZERO if set(numbers) == {0} else Row.DUPLICATED}


def test_a_hook_gathers_the_routers_own_scores_and_their_gradient() -> None:
    hook = RouterHook()
    scores = torch.tensor([[0.1, 0.4, 0.3, 0.2]], requires_grad=True)
    values, experts = hook.get_replay_topk(scores, 2, None, None, plain_topk)
    assert experts.tolist() == [[1, 2]]
    assert hook.counted is None
    (hook.routes,) = ReplayRoutes.of(torch.tensor([[[3, 0]]], dtype=torch.int16), 4).by_layer()
    hook.shows = hook.shows_margin = True
    values, experts = hook.get_replay_topk(scores, 2, None, None, plain_topk)
    assert experts.tolist() == [[3, 0]]
    values.sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [[1, 0, 0, 1]]
    (seen,) = hook.take()
    assert seen.live.tolist() == [[1, 2]]
    assert seen.margin is not None
    assert seen.margin.tolist() == pytest.approx([0.1])
    assert hook.counted is not None
    assert hook.counted.tolist() == [[1, 2]], "the load that is to be evened out is the router's own"
    assert hook.take() == []


@pytest.mark.parametrize("replays", [False, True])
def test_a_captured_expert_that_ties_with_the_last_chosen_one_agrees(replays: bool) -> None:
    scores = torch.tensor([[0.4, 0.2, 0.2, 0.1], [0.3, 0.3, 0.3, 0.3], [0.4, 0.2, 0.2, 0.1], [0.4, 0.2, 0.2, 0.1]])
    capture = torch.tensor([[0, 2], [3, 1], [0, 3], [0, 9]], dtype=torch.int16)[:, None]
    rows = ReplayRoutes.of(capture, 4)
    hook = RouterHook()
    (hook.compared,) = rows.by_layer()
    hook.routes = hook.compared if replays else None
    hook.shows = hook.shows_margin = True
    _, taken = hook.get_replay_topk(scores, 2, None, None, plain_topk)
    own = plain_topk(scores, 2)[1]
    assert taken.tolist() == ([[0, 2], [3, 1], [0, 3], own[3].tolist()] if replays else own.tolist())
    statistics = AgreementStatistics(1, 4, torch.device("cpu"))
    statistics.add(0, torch.tensor([0]), rows, torch.ones(4, dtype=torch.bool), hook.take())
    found = statistics.rows[0]
    assert (int(found[Row.USABLE]), int(found[Row.LIVE_SAME])) == (3, 2), "either of two equal experts is right"
    assert int(found[Row.TAKEN_SAME]) == (3 if replays else 2)


def test_a_hook_of_a_router_that_has_groups_asks_what_stood_there_before() -> None:
    class LastExperts:
        def get_replay_topk(self, scores, topk, num_groups, group_topk, default_compute_topk):  # type: ignore[no-untyped-def]
            assert (num_groups, group_topk) == (2, 1)
            return scores[:, -topk:], torch.arange(scores.shape[1])[None, -topk:].expand(len(scores), -1)

    values, experts = RouterHook(LastExperts()).get_replay_topk(torch.arange(8.0).view(2, 4), 2, 2, 1, plain_topk)
    assert experts.tolist() == [[2, 3], [2, 3]]
    assert values.tolist() == [[2, 3], [6, 7]]


def test_routes_of_other_tokens_are_refused() -> None:
    hook = RouterHook()
    (hook.routes,) = ReplayRoutes.of(torch.zeros(3, 1, 2, dtype=torch.int16), 4).by_layer()
    with pytest.raises(ValueError, match=r"got \(3, 2\), expected \(2, 2\)"):
        hook.get_replay_topk(torch.rand(2, 4), 2, None, None, plain_topk)


class BestGroup:
    """Chooses from the better of two groups, by their two best experts."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int, group_topk: int, default_compute_topk: object
    ) -> tuple[Tensor, Tensor]:
        return scores[:, :3].topk(topk, dim=-1)

    def margins(self, scores: Tensor, topk: int, num_groups: int, group_topk: int) -> Tensor:
        return group_limited_margins(scores, topk, num_groups, group_topk, 2)


def test_margins_of_groups_are_those_of_the_cut_that_comes_first() -> None:
    scores = torch.tensor(
        [
            # Groups 1.5 and 1.3: nearer than the experts 0.7 and 0.3, though 0.9 of the other group is the best of all.
            [0.8, 0.7, 0.3, 0.9, 0.4, 0.2],
            # Groups 1.5 and 0.3; experts 0.7 and 0.65.
            [0.8, 0.7, 0.65, 0.2, 0.1, 0.0],
        ]
    )
    expected = [pytest.approx(0.2, abs=1e-6), pytest.approx(0.05, abs=1e-6)]
    assert group_limited_margins(scores, 2, 2, 1, 2).tolist() == expected
    assert margins(scores, 2)[0] == pytest.approx(0.1, abs=1e-6), "what the highest scores of all would say"
    # As many experts as the group has: only the groups' cut is left.
    assert group_limited_margins(scores, 3, 2, 1, 2)[0] == pytest.approx(0.2, abs=1e-6)
    hook = RouterHook(BestGroup())
    hook.shows = hook.shows_margin = True
    hook.get_replay_topk(scores, 2, 2, 1, plain_topk)
    (seen,) = hook.take()
    assert seen.margin is not None
    assert seen.margin.tolist() == expected


def test_margins_of_routers_that_leave_none_out_are_infinite() -> None:
    assert margins(torch.tensor([[3.0, 1.0, 2.0]]), 2).tolist() == [1.0]
    assert margins(torch.tensor([[3.0, 1.0]]), 2).tolist() == [torch.inf]


def statistics_of(
    capture: torch.Tensor, live: torch.Tensor, fed: torch.Tensor, experts: int = 8
) -> AgreementStatistics:
    statistics = AgreementStatistics(2, experts, torch.device("cpu"))
    margin = torch.full((len(live),), 0.02)
    routes = ReplayRoutes.of(capture[:, None], experts)
    seen = RoutedTokens(live, replayed(live, routes.by_layer()[0]), margin)
    statistics.add(0, torch.tensor([1]), routes, fed, [seen])
    return statistics


def test_the_statistics_of_one_layer() -> None:
    capture = torch.tensor([[1, 0], [2, 4], [-1, -1], [0, 0], [9, 1], [3, 2]], dtype=torch.int16)
    live = torch.cat([LIVE, torch.tensor([[2, 3]])])
    totals = statistics_of(capture, live, torch.tensor([True] * 5 + [False])).reduced()
    assert totals.rows[0].sum() == 0
    counted = {kind: int(totals.rows[1, kind]) for kind in Row}
    assert counted == {
        Row.EXPECTED: 5,
        Row.USABLE: 2,
        Row.MISSING: 1,
        Row.ZERO: 1,
        Row.DUPLICATED: 0,
        Row.OUT_OF_RANGE: 1,
        Row.UNEXPECTED: 1,
        Row.TAKEN_SAME: 2,
        Row.LIVE_SAME: 1,
        Row.LIVE_SLOTS: 3,
    }
    assert totals.captured_experts[1].tolist() == [1, 1, 1, 0, 1, 0, 0, 0]
    assert totals.live_experts[1].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert totals.margins[1, 3].tolist() == [2, 1], "both rows between 0.01 and 0.03, one of which differs"
    metrics = agreement_metrics(totals, (0, 3), per_layer=True)
    assert metrics["routing/rows_missing_share"] == 0.2
    assert metrics["routing/agreement"] == 1
    assert metrics["routing/live_agreement"] == metrics["routing/live_agreement_layer_3"] == 0.5
    assert metrics["routing/slot_agreement"] == 0.75
    assert metrics["routing/flip_margin_median"] == 0.03
    assert metrics["routing/narrow_margin_share"] == 0
    assert totals.tokens.tolist() == [2, 1]
    assert totals.rows_differing == totals.tokens_differing == metrics["routing/tokens_differing_share"] == 0.5


def test_rows_that_no_router_chooses_are_anomalies() -> None:
    capture = torch.tensor([[1, 0], [2, 4], [-1, -1], [0, 0], [9, 1], [3, 2], [5, 5]], dtype=torch.int16)
    live = torch.cat([LIVE, torch.tensor([[2, 3], [2, 3]])])
    totals = statistics_of(capture, live, torch.tensor([True] * 5 + [False, True])).reduced()
    assert [anomaly.text for anomaly in row_anomalies(totals, (0, 3))] == [
        "1 of 6 rows hold expert 0 alone, in layers 3",
        "1 of 6 rows name an expert twice, in layers 3",
        "1 of 6 rows name experts that do not exist, in layers 3",
        "1 of 6 rows belong to padding or to the last token of a sequence, in layers 3",
    ]
    assert row_anomalies(statistics_of(LIVE, LIVE, torch.ones(5, dtype=torch.bool)).reduced(), (0, 3)) == []


def test_agreement_by_chance_is_that_of_shuffled_tokens() -> None:
    """Routes of other tokens of the same layer agree as the experts' popularity alone makes them, and kappa is 0."""
    generator = np.random.default_rng(3)
    popularity = np.arange(1.0, 17.0)
    draws = np.log(popularity) + generator.gumbel(size=(40_000, 16))
    live = torch.from_numpy(np.argsort(-draws, axis=1)[:, :4].copy())
    capture = live[torch.from_numpy(generator.permutation(len(live)))].to(torch.int16)
    totals = statistics_of(capture, live, torch.ones(len(live), dtype=torch.bool), 16).reduced()
    metrics = agreement_metrics(totals, (0, 1), per_layer=False)
    assert metrics["routing/slot_agreement"] == pytest.approx(float(slot_chance(totals)[1]), abs=0.005)
    assert metrics["routing/slot_agreement"] > 0.3, "far above 4 of 16"
    assert metrics["routing/slot_kappa"] == pytest.approx(0, abs=0.01)


def test_without_rows_there_are_no_metrics() -> None:
    empty = AgreementStatistics(2, 8, torch.device("cpu")).reduced()
    assert agreement_metrics(empty, (0, 1), per_layer=True) == {}
    unknown = statistics_of(torch.full((5, 2), -1), LIVE, torch.ones(5, dtype=torch.bool)).reduced()
    assert agreement_metrics(unknown, (0, 1), per_layer=True)["routing/rows_missing_share"] == 1


def test_the_page_names_every_metric(repository_root: Path) -> None:
    page = (repository_root / "docs" / "routing-replay.md").read_text()
    named = set(re.findall(r"^\| `(routing/[^`]+)` \|", page, re.MULTILINE))
    capture = torch.tensor([[1, 0], [2, 4], [4, 5], [6, 7], [0, 1]], dtype=torch.int16)
    totals = statistics_of(capture, LIVE, torch.ones(5, dtype=torch.bool)).reduced()
    found = agreement_metrics(totals, (0, 3), per_layer=True)
    # What the agreement statistics finds is counted where all ranks' parts of it are, and the capture measured where it
    # is handed on.
    elsewhere = {"routing/anomalies", "routing/captured_bytes"}
    assert {re.sub(r"layer_\d+$", "layer_{i}", name) for name in found} | elsewhere == named
    # Those that a healthy step has none of are a list below the table.
    for name in ("rows_missing_in_one_rank", "rank_with_missing_rows", "float32_flips_share"):
        assert f"`routing/{name}`" in page
