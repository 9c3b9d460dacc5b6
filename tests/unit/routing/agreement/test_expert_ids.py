# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Permuted and exchanged expert ids are found and named at the noise of any number format; healthy routes have none."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from nemo_rl_moe.routing.agreement.rank_rows import rows_by_rank
from nemo_rl_moe.routing.agreement.report import CheckTotals, routing_report
from nemo_rl_moe.routing.agreement.route_identity import RouteSample, find_anomalies
from nemo_rl_moe.routing.agreement.statistics import AgreementStatistics, RoutingReport
from nemo_rl_moe.routing.replay import ReplayRoutes, RoutedTokens
from nemo_rl_moe.token_lag import LAG_CLASSES
from tests.support.quick_list import some_of

LAYERS = (1, 2, 3, 5)
EXACT, BFLOAT16, ROUGH = 0.0, 0.004, 0.1
"""Noise of a router's logits: a few rows in a hundred differ at the second, every tenth or fifth at the last."""
Captured = np.ndarray
SHAPES = [(64, 28, 8, 2), (8, 20, 8, 2), (64, 28, 8, 1), (64, 28, 8, 4), (16, 48, 64, 6), (4, 100, 128, 8)]
"""Sequences, their tokens, experts, and those of a token; of two sequences the last 48 tokens are sampled."""


def report_of(
    shape: tuple[int, ...],
    fault: Callable[[Captured], None] | None = None,
    *,
    noise: float = BFLOAT16,
    skew: float = 0.0,
    seed: int = 0,
    repeats: bool = False,
    twins: bool = False,
    older_weights: bool = False,
) -> RoutingReport:
    """Report of a step whose routers see tokens of their own, with noise of their own on both sides.

    Args:
        shape: As in `SHAPES`.
        fault: Changes the captured routes.
        noise: Of the logits.
        skew: Spread of the experts' popularity, in logits.
        seed: Of all of it.
        repeats: Every sequence ends with one token again and again.
        twins: Two experts have the same logits.
        older_weights: The tokens have a lag.
    """
    sequences, tokens, experts, topk = shape
    generator = np.random.default_rng(seed)
    inputs = generator.normal(size=(sequences, tokens, 16))
    if repeats:
        inputs[:, tokens // 3 :] = inputs[:, tokens // 3, None]
    weights = generator.normal(size=(len(LAYERS), 16, experts)) / 4
    logits = np.einsum("std,lde->stle", inputs, weights) + skew * generator.normal(size=(len(LAYERS), experts))
    if twins:
        logits[..., 1] = logits[..., 0]
    captured, live = ((-logits - noise * generator.normal(size=logits.shape)).argsort(-1)[..., :topk] for _ in range(2))
    if fault is not None:
        fault(captured)
    scores = np.exp(logits - logits.max(-1, keepdims=True))
    best = np.sort(scores / scores.sum(-1, keepdims=True))[..., ::-1]
    margins = best[..., topk - 1] - best[..., topk] if topk < experts else np.full(best.shape[:-1], np.inf)
    statistics = AgreementStatistics(len(LAYERS), experts, torch.device("cpu"))
    rows, chosen, margin = (torch.from_numpy(of.reshape(-1, *of.shape[2:]).copy()) for of in (captured, live, margins))
    seen = [RoutedTokens(chosen[:, n], chosen[:, n], margin[:, n].float()) for n in range(len(LAYERS))]
    fed = torch.ones(len(rows), dtype=torch.bool)
    statistics.add(0, torch.arange(len(LAYERS)), ReplayRoutes.of(rows, experts), fed, seen)
    sample = RouteSample(captured[:2, -48:].astype(np.int32), live[:2, -48:].astype(np.int32))
    totals = statistics.reduced()
    by_lag = torch.zeros(len(LAG_CLASSES), 2, dtype=torch.long)
    by_lag[int(older_weights)] = len(fed)
    checked = CheckTotals(
        torch.zeros(3, dtype=torch.long), rows_by_rank(totals.rows, 0), num_ranks=1, is_exact=False, by_lag=by_lag
    )
    return routing_report(LAYERS, totals, checked, sample, num_experts=experts, per_layer=True)


def permuted(ids: np.ndarray, place: int = 2) -> Callable[[Captured], None]:
    def fault(captured: Captured) -> None:
        captured[:, :, place] = ids[captured[:, :, place]]

    return fault


def exchanged(one: int, other: int, num_experts: int, place: int = 2) -> Callable[[Captured], None]:
    ids = np.arange(num_experts)
    ids[[one, other]] = other, one
    return permuted(ids, place)


@pytest.mark.parametrize("noise", [EXACT, BFLOAT16])
@pytest.mark.parametrize("seed", some_of(range(5), 2))
@pytest.mark.parametrize("shape", SHAPES)
def test_a_permuted_layer_is_found_and_its_ids_are_named(shape: tuple[int, ...], seed: int, noise: float) -> None:
    ids = (np.random.default_rng(seed).permutation(shape[2] - 1) + 1).tolist()
    ids = np.array([ids[-1], *ids[:-1], 0])
    (found,) = report_of(shape, permuted(ids), noise=noise, seed=seed).anomalies
    assert (found.kind, found.layer) == ("ids", 3)
    assert found.text.startswith("layer 3: captured expert ids are a permutation of the router's (")
    named = [pair.split("->") for pair in found.text.split("(")[1].split(")")[0].split(", ") if "->" in pair]
    assert all(ids[int(own)] == int(captured) for captured, own in named)
    before, after = found.text.split("agreement ")[1].split(" after")[0].split(" becomes ")
    assert float(after) > max(float(before) + 0.3, 0.7)  # ids that the sample has not are missing


@pytest.mark.parametrize("noise", [EXACT, BFLOAT16])
@pytest.mark.parametrize("seed", some_of(range(5), 2))
@pytest.mark.parametrize("shape", SHAPES[:5])
def test_two_ids_that_are_exchanged_are_named(shape: tuple[int, ...], seed: int, noise: float) -> None:
    (found,) = report_of(shape, exchanged(3, 5, shape[2]), noise=noise, seed=seed).anomalies
    assert (found.kind, found.layer) == ("ids", 3)
    assert found.text.startswith("layer 3: captured expert ids are a permutation of the router's (3->5, 5->3): ")


def test_two_ids_that_the_sample_seldom_has_are_named_by_the_counts_of_all_rows() -> None:
    """Few of 128 experts stand in the last tokens of two sequences."""
    (found,) = report_of((60, 100, 128, 2), exchanged(7, 90, 128), seed=1).anomalies
    assert found.text.startswith("layer 3: captured expert ids are a permutation of the router's (7->90, 90->7): ")


def test_layers_that_are_all_permuted_are_one_anomaly() -> None:
    def fault(captured: Captured) -> None:
        for place in range(len(LAYERS)):
            permuted(np.roll(np.arange(8), place + 1), place)(captured)

    (found,) = report_of(SHAPES[0], fault).anomalies
    assert (found.kind, found.layer) == ("ids", None)
    assert [part.split(":")[0] for part in found.text.split("; ")] == ["layer 1", "layer 2", "layer 3", "layer 5"]


@pytest.mark.parametrize("twins", [False, True])
@pytest.mark.parametrize("noise", [EXACT, BFLOAT16, ROUGH])
@pytest.mark.parametrize("skew", [0.0, 1.5, 8.0])
@pytest.mark.parametrize(
    "shape", some_of([(shape,) for shape in (*SHAPES[:4], (4, 10, 4, 1), (64, 28, 8, 7), (32, 28, 8, 8))], 2)
)
def test_healthy_routes_have_no_permutation(shape: tuple[int, ...], skew: float, noise: float, twins: bool) -> None:
    """Also few tokens, routers that use a few experts alone, all experts for every token, and two equal experts."""
    for seed in range(3):
        for repeats in (False, True):
            report = report_of(shape, noise=noise, skew=skew, seed=seed, repeats=repeats, twins=twins)
            assert [found.kind for found in report.anomalies if found.kind in ("ids", "layer", "unrelated")] == []


@pytest.mark.parametrize("seed", range(5))
def test_routes_of_other_tokens_are_no_permutation(seed: int) -> None:
    def fault(captured: Captured) -> None:
        captured[:] = captured[np.random.default_rng(seed).permutation(len(captured))][:, ::-1]

    for skew in (0.0, 1.5):
        report = report_of(SHAPES[0], fault, skew=skew, seed=seed)
        assert {found.kind for found in report.anomalies} == {"sequence"}


@pytest.mark.parametrize("seed", range(5))
def test_a_permuted_layer_is_not_taken_for_another_layer(seed: int) -> None:
    """If one popular expert has a popular one's id, two layers agree in a third of the experts: by chance."""
    generator = np.random.default_rng(seed)
    live = (generator.gumbel(size=(4, 48, 4, 8)) + np.linspace(0, 3, 8)).argsort(-1)[..., -2:]
    captured = live.copy()
    captured[:, :, 1] = 7 - captured[:, :, 1]
    captured[:, :, 1] = np.where(generator.random((4, 48, 1)) < 0.5, captured[:, :, 1], live[:, :, 3])
    found = find_anomalies(RouteSample(captured, live), 8, LAYERS)
    assert [anomaly for anomaly in found if anomaly.kind == "layer"] == []


def test_a_layer_that_agrees_with_nothing_is_reported() -> None:
    def fault(captured: Captured) -> None:
        captured[:, :, 1] = np.random.default_rng(0).random((*captured.shape[:2], 8)).argsort(-1)[..., :2]

    (found,) = report_of(SHAPES[0], fault).anomalies
    assert (found.kind, found.layer) == ("unrelated", 2)
    assert found.text.startswith(
        "the routes of layer 2 are not those of these tokens: they agree with the routers in 0.2"
    )


@pytest.mark.parametrize("noise", [BFLOAT16, ROUGH])
def test_rows_that_differ_whatever_their_margin_are_a_metric(noise: float) -> None:
    """A part of the sequences has another part's routes: no id, layer or sampled sequence explains it."""

    def fault(captured: Captured) -> None:
        captured[20:34] = captured[34:48]

    healthy = report_of(SHAPES[0], noise=noise)
    assert (healthy.anomalies, [key for key in healthy.metrics if "clear" in key]) == ((), [])
    wrong = report_of(SHAPES[0], fault, noise=BFLOAT16)
    assert wrong.anomalies == ()
    assert wrong.metrics["routing/clear_rows_differing_share"] == pytest.approx(0.21, abs=0.06)
    assert wrong.metrics["routing/clear_rows_differing_layer"] in LAYERS


MOVED = 2.0
"""Noise of logits as of weights that many fast updates lie between: routers choose other experts for most tokens."""


@pytest.mark.parametrize("older_weights", [False, True])
@pytest.mark.parametrize("noise", [MOVED, 0.4])
def test_older_weights_explain_disagreement(noise: float, older_weights: bool) -> None:
    report = report_of((64, 28, 8, 2), noise=noise, older_weights=older_weights)
    differs = "routing/clear_rows_differing_share" in report.metrics
    assert bool(report.anomalies or differs) is not older_weights


def one_token_late(captured: Captured) -> None:
    captured[:, 1:] = captured[:, :-1].copy()


def other_layer(captured: Captured) -> None:
    captured[:, :, 1] = captured[:, :, 2]


def all_ids_moved(captured: Captured) -> None:
    captured[:, :, 2] = (captured[:, :, 2] + 3) % 8


@pytest.mark.parametrize(("fault", "kind"), [(one_token_late, "token"), (other_layer, "layer"), (all_ids_moved, "ids")])
def test_routes_that_fit_elsewhere_are_reported_with_older_weights_too(
    fault: Callable[[Captured], None], kind: str
) -> None:
    report = report_of((64, 28, 8, 2), fault, noise=ROUGH, older_weights=True)
    assert {anomaly.kind for anomaly in report.anomalies} == {kind}
