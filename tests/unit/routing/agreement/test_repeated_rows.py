# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows that stand more than once are found; those that repeat by themselves, and noise, are not."""

from collections.abc import Iterable

import numpy as np
import pytest
import torch

from nemo_rl_moe.routing.agreement.repeated_rows import Repeat, RepeatedRows, repeat_anomalies
from nemo_rl_moe.routing.replay import ReplayRoutes, in_planes

EXPERTS, TOPK, LAYERS, LENGTH = 16, 4, 3, 50


def routes_of(seed: int, tokens: int, *, repeating: float = 0.0) -> torch.Tensor:
    """Random routes, of which a share of the tokens gets those of the token before."""
    generator = torch.Generator().manual_seed(seed)
    routes = torch.rand(tokens, LAYERS, EXPERTS, generator=generator).topk(TOPK, -1).indices
    again = torch.rand(tokens, generator=generator) < repeating
    for token in range(1, tokens):
        if again[token]:
            routes[token] = routes[token - 1]
    return routes


def _other_expert(routes: torch.Tensor) -> torch.Tensor:
    """One that a row does not have."""
    taken = torch.zeros(*routes.shape[:-1], EXPERTS).scatter_(-1, routes, 1.0)
    return taken.argmin(-1)


def counted(capture: torch.Tensor, live: torch.Tensor, fed: torch.Tensor | None = None) -> torch.Tensor:
    """Counts of sequences of 50 tokens behind one another."""
    follows = torch.arange(len(live)) % LENGTH > 0
    rows = RepeatedRows(torch.device("cpu"))
    everything = torch.ones(len(live), dtype=torch.bool)
    routes = ReplayRoutes.of(capture.to(torch.int16), EXPERTS)
    rows.add(routes, in_planes(live, EXPERTS), everything if fed is None else fed, 1, follows)
    return rows.counts


def others_of(capture: torch.Tensor, live: torch.Tensor, tokens: Iterable[int]) -> list[int]:
    """Return rows for which the router chooses other experts than the capture has, and than the token before."""
    return [
        token
        for token in tokens
        if sum(len({*a} & {*b}) for a, b in zip(capture[token].tolist(), live[token].tolist(), strict=True))
        < LAYERS * TOPK / 2
        and not bool((live[token].sort().values == live[token - 1].sort().values).all())
    ]


@pytest.mark.parametrize("repeating", [0.0, 0.1])
def test_a_row_that_is_replayed_67_times_is_found(repeating: float) -> None:
    """Also where a tenth of the tokens repeat by themselves, on the capture as in the router."""
    live = routes_of(1, 1000, repeating=repeating)
    capture = live.clone()
    capture[210:240] = live[210]
    capture[410:447] = live[410]
    counts = counted(capture, live)
    # The first of each row is right; routers repeat some themselves, or choose much the same experts by chance.
    alone = len(others_of(capture, live, (*range(211, 240), *range(411, 447))))
    assert 50 < alone < 65
    assert counts.tolist() == [alone, 0, 1000]
    (found,) = repeat_anomalies(counts)
    assert found.kind == "repeated"
    assert found.text.startswith(f"{alone} of 1,000 tokens carry the routes of the token before them in every")


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("repeating", [0.0, 0.05, 0.5])
def test_noise_on_either_side_is_no_repetition(seed: int, repeating: float) -> None:
    """An expert in a third of the rows, on the capture or in the router; a capture without any relation to it."""
    live = routes_of(seed, 2000, repeating=repeating)
    noisy = live.clone()
    flipped = torch.from_numpy(np.random.default_rng(seed).random((2000, LAYERS)) < 0.3)
    noisy[..., 0] = torch.where(flipped, _other_expert(noisy), noisy[..., 0])
    for capture, router in ((noisy, live), (live, noisy), (routes_of(seed + 50, 2000, repeating=repeating), live)):
        assert repeat_anomalies(counted(capture, router)) == []


def test_tokens_that_were_not_fed_and_unknown_rows_do_not_count() -> None:
    live = routes_of(2, 200)
    capture = live.clone()
    capture[101:140] = live[100]
    assert counted(capture, live)[Repeat.CAPTURE] == len(others_of(capture, live, range(101, 140)))
    fed = torch.ones(200, dtype=torch.bool)
    fed[120:] = False
    assert counted(capture, live, fed)[Repeat.CAPTURE] == len(others_of(capture, live, range(101, 120)))
    capture[110:130] = -1
    known = [*range(101, 110), *range(131, 140)]
    assert counted(capture, live)[Repeat.CAPTURE] == len(others_of(capture, live, known))
