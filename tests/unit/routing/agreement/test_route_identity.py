# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Planted faults of a capture are found and named; healthy captures, also noisy and unbalanced ones, have none."""

from collections.abc import Callable

import numpy as np
import pytest

from nemo_rl_moe.routing.agreement.route_identity import (
    SHIFTS,
    OneHot,
    RouteSample,
    find_anomalies,
    foreign_capture,
    layer_overlap,
    ownership,
    sequence_overlap,
    shift_overlap,
)

EXPERTS, TOPK, LAYERS = 16, 4, (1, 2, 3, 5, 7)
Routes = np.ndarray


def routes_of(seed: int, sequences: int = 6, tokens: int = 48, skew: float = 0.15) -> Routes:
    """Routes whose experts differ in popularity, in each layer in another way."""
    generator = np.random.default_rng(seed)
    popularity = skew * np.arange(EXPERTS)
    scores = generator.gumbel(size=(sequences, tokens, len(LAYERS), EXPERTS))
    scores += np.stack([generator.permutation(popularity) for _ in LAYERS])
    return np.argsort(-scores, axis=-1)[..., :TOPK].astype(np.int16)


def with_flips(live: Routes, share: float, seed: int = 5) -> Routes:
    """Exchange one expert of some rows, as rounding does."""
    generator = np.random.default_rng(seed)
    capture = live.copy()
    for place in zip(*np.nonzero(generator.random(live.shape[:-1]) < share), strict=True):
        others = np.setdiff1d(np.arange(EXPERTS), live[place])
        capture[place][generator.integers(TOPK)] = generator.choice(others)
    return capture


def other_layer(capture: Routes) -> Routes:
    capture[:, :, 2] = capture[:, :, 1]
    return capture


def one_late(capture: Routes) -> Routes:
    return np.concatenate([np.full_like(capture[:, :1], -1), capture[:, :-1]], axis=1)


def one_early_in_one(capture: Routes) -> Routes:
    capture[3, :-1] = capture[3, 1:].copy()
    return capture


def swapped(capture: Routes) -> Routes:
    capture[[0, 4]] = capture[[4, 0]]
    return capture


def of_nobody_here(capture: Routes) -> Routes:
    capture[1] = routes_of(99)[1]
    return capture


def of_another_step(capture: Routes) -> Routes:
    """All of them strangers, that begin as the sequences of this step do: the first rows are right."""
    stale = routes_of(77, skew=0.3)
    stale[:, :8] = capture[:, :8]
    return stale


FAULTS: dict[str, tuple[Callable[[Routes], Routes], list[str]]] = {
    "layer": (other_layer, ["layer 3 carries layer 2's routes"]),
    "late": (one_late, ["routes are one token late"]),
    "early": (one_early_in_one, ["routes are one token early in sequence d"]),
    "swapped": (
        swapped,
        ["sequence a carries the routes of sequence e", "sequence e carries the routes of sequence a"],
    ),
    "not its own": (of_nobody_here, ["the routes of sequence b are not its own"]),
    "stale": (of_another_step, ["the routes of sequences a, b, c, d, e, f are not their own"]),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("flips", [0.0, 0.3])
def test_a_planted_fault_is_named(name: str, flips: float) -> None:
    fault, expected = FAULTS[name]
    live = routes_of(1)
    found = find_anomalies(RouteSample(fault(with_flips(live, flips)), live), EXPERTS, LAYERS, list("abcdef"))
    assert [anomaly.text.split(":")[0] for anomaly in found] == expected


def test_ownership_is_that_of_a_walk_over_the_rows() -> None:
    live = routes_of(6, sequences=3, tokens=4)
    live[1, :2] = live[0, :2]
    capture = with_flips(live, 0.5)
    capture[0, 3, 1] = -1
    values, rows = ownership(OneHot(RouteSample(capture, live), EXPERTS))
    for s in range(3):
        preferred = most = 0
        used = set()
        for other in {0, 1, 2} - {s}:
            for t in range(4):
                for i in range(len(LAYERS)):
                    of_capture, mine, theirs = (
                        set(routes[t, i].tolist()) for routes in (capture[s], live[s], live[other])
                    )
                    if -1 in of_capture or mine == theirs:
                        continue
                    preferred += len(of_capture & mine) - len(of_capture & theirs)
                    most += TOPK - len(mine & theirs)
                    used.add((t, i))
        assert values[s] == pytest.approx(preferred / most)
        assert rows[s] == len(used)


@pytest.mark.parametrize("skew", [0.0, 0.15, 0.6])
@pytest.mark.parametrize("seed", range(20))
def test_healthy_captures_have_no_anomaly(seed: int, skew: float) -> None:
    """Also where a quarter of the rows differ, some are unknown, and popular experts make layers agree by chance."""
    live = routes_of(seed, skew=skew)
    capture = with_flips(live, 0.25, seed)
    capture[np.random.default_rng(seed).random(capture.shape[:-1]) < 0.2] = -1
    assert find_anomalies(RouteSample(capture, live), EXPERTS, LAYERS) == []


def test_sequences_with_the_same_tokens_are_not_taken_for_each_other() -> None:
    live = routes_of(2)
    live[3] = live[2]
    assert find_anomalies(RouteSample(live.copy(), live), EXPERTS, LAYERS) == []


def test_overlaps_are_those_of_a_walk_over_the_rows() -> None:
    live = routes_of(3, sequences=2, tokens=5)
    capture = with_flips(live, 0.5)
    capture[0, 1, 2] = -1
    sample = RouteSample(capture, live)

    def walk(pairs: list[tuple[Routes, Routes]]) -> float:
        known = [(set(a.tolist()), set(b.tolist())) for a, b in pairs if a[0] >= 0]
        return sum(len(a & b) for a, b in known) / (TOPK * len(known))

    for i in range(len(LAYERS)):
        for j in range(len(LAYERS)):
            pairs = [(capture[s, t, i], live[s, t, j]) for s in range(2) for t in range(5)]
            # A row that is unknown in its own layer counts for no partner.
            assert layer_overlap(sample, EXPERTS)[i, j] == pytest.approx(walk(pairs))
    for s in range(2):
        for column, shift in enumerate(SHIFTS):
            places = [t for t in range(5) if 0 <= t + shift < 5]
            pairs = [(capture[s, t, i], live[s, t + shift, i]) for t in places for i in range(len(LAYERS))]
            assert shift_overlap(OneHot(sample, EXPERTS)).share[s, column] == pytest.approx(walk(pairs))
        for other in range(2):
            pairs = [(capture[s, t, i], live[other, t, i]) for t in range(5) for i in range(len(LAYERS))]
            assert sequence_overlap(OneHot(sample, EXPERTS)).share[s, other] == pytest.approx(walk(pairs))


def test_nothing_is_said_of_what_is_not_known() -> None:
    live = routes_of(4)
    assert find_anomalies(RouteSample(np.full_like(live, -1), live), EXPERTS, LAYERS) == []


def test_a_capture_that_agrees_by_chance_is_of_other_tokens() -> None:
    (found,) = foreign_capture(0.312)
    assert found.kind == "sequence"
    assert found.text.startswith(
        "the routes are not those of these tokens: their agreement with routers beyond chance is 0.312"
    )
    assert foreign_capture(0.8) == foreign_capture(None) == []
