# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nemo_rl_moe.routing.findings.tracker import QUIET_STEPS, Finding, FindingTracker, Thresholds
from tests.support.made_runs import THRESHOLDS, random_counts
from tests.support.quick_list import examples

EVEN = [100, 100, 100, 100]
DEAD = [0, 133, 133, 134]
OFF, DEAD_ONLY = Thresholds(None, None, None, 1), Thresholds(3, None, None, 1)


def watch(
    steps: Sequence[Sequence[Sequence[int]] | NDArray[np.int64] | None],
    thresholds: Thresholds = THRESHOLDS,
    *,
    topk: int | None = 2,
    layers: Sequence[int] | None = None,
    metrics: Sequence[dict[str, float]] = (),
) -> tuple[list[Finding], list[list[Finding]]]:
    """All findings at the end, and what each of the steps 1, 2, ... began."""
    tracker = FindingTracker(thresholds, topk)
    begun = []
    for step, counts in enumerate(steps, start=1):
        matrix = None if counts is None else np.array(counts, dtype=np.int64)
        observed = metrics[step - 1] if metrics else {}
        of_layers = layers if layers is not None else range(0 if matrix is None else len(matrix))
        begun.append(tracker.observe(step, observed, of_layers, matrix))
    return tracker.findings, begun


def test_dead_experts_are_reported_once_an_episode() -> None:
    findings, begun = watch([[EVEN], [DEAD], [DEAD], [DEAD], [DEAD], [EVEN], [DEAD], [DEAD]], DEAD_ONLY)
    assert [len(found) for found in begun] == [0, 0, 0, 1, 0, 0, 0, 0]
    (finding,) = findings
    assert finding.text == "layer 0: 1 of 4 experts dead since step 2; beyond sampling noise"
    assert (finding.first_step, finding.last_step, finding.is_over) == (2, 5, True)


def test_a_second_episode_is_a_second_finding() -> None:
    quiet = QUIET_STEPS + 1
    findings, begun = watch([[DEAD]] * 3 + [[EVEN]] * quiet + [[DEAD]] * 3, DEAD_ONLY)
    assert [step for step, found in enumerate(begun, 1) if found] == [3, quiet + 6]
    assert [(finding.first_step, finding.is_over) for finding in findings] == [(1, True), (quiet + 4, False)]


def test_what_comes_back_after_few_quiet_steps_is_the_same_finding() -> None:
    steps = [[DEAD]] * 3 + [[EVEN]] * QUIET_STEPS
    (over,), _ = watch(steps, DEAD_ONLY)
    assert (over.first_step, over.last_step, over.is_over) == (1, 3, True)
    (finding,), begun = watch(steps + [[DEAD]] * 3, DEAD_ONLY)
    assert [step for step, found in enumerate(begun, 1) if found] == [3]
    assert (finding.first_step, finding.last_step, finding.is_over) == (1, QUIET_STEPS + 6, False)


@pytest.mark.parametrize(("dead_expert_steps", "every"), [(20, 22), (QUIET_STEPS + 20, QUIET_STEPS + 22)])
def test_an_expert_with_a_token_now_and_then_is_reported_once(dead_expert_steps: int, every: int) -> None:
    """The steps that it takes to find it dead again are not quiet ones."""
    steps = [[[int(step % every == 0), 133, 133, 134]] for step in range(1, 1001)]
    (finding,), begun = watch(steps, Thresholds(dead_expert_steps, None, None, 20))
    assert sum(map(len, begun)) == 1
    assert finding.first_step == 1


def test_loads_that_even_out_for_a_step_now_and_then_are_reported_once() -> None:
    steps = [[EVEN if step % 21 == 0 else [250, 50, 50, 50]] for step in range(1, 1001)]
    (finding,), begun = watch(steps, Thresholds(None, 0.5, None, 20))
    assert sum(map(len, begun)) == 1
    assert finding.first_step == 1


def test_a_finding_keeps_its_beginning_while_more_experts_die() -> None:
    findings, _ = watch([[[0, 10**4, 10**4, 10**4]]] * 3 + [[[0, 0, 10**4, 10**4]]] * 4)
    dead = [finding for finding in findings if finding.kind == "dead_experts"]
    assert [(finding.first_step, finding.last_step) for finding in dead] == [(1, 7)]
    assert dead[0].text.startswith("layer 0: 2 of 4 experts dead since step 1")


def test_a_finding_keeps_its_beginning_when_its_first_expert_revives() -> None:
    first, both, second = [0, 133, 133, 134], [0, 0, 200, 200], [133, 0, 133, 134]
    findings, begun = watch([[first]] * 3 + [[both]] * 4 + [[second]], DEAD_ONLY)
    assert [len(found) for found in begun] == [0, 0, 1, 0, 0, 0, 0, 0]
    (finding,) = findings
    assert (finding.first_step, finding.last_step, finding.is_over) == (1, 8, False)
    assert finding.text.startswith("layer 0: 1 of 4 experts dead since step 4")


def test_an_expert_that_should_have_had_few_tokens_is_not_dead() -> None:
    # 4 tokens on average in 8 steps: 32 are expected, which chance misses with a probability of e^-32.
    few, enough = [[0, 1, 1, 1]], [[0, 5, 5, 6]]
    assert watch([few] * 20, DEAD_ONLY)[0] == []
    assert watch([few] * 40, DEAD_ONLY)[0][0].text.startswith("layer 0: 1 of 4 experts dead since step 1")
    (finding,), begun = watch([enough] * 8, DEAD_ONLY)
    assert [len(found) for found in begun] == [0, 0, 0, 0, 0, 1, 0, 0]  # 6 x 4 > log(4 / 1e-9) = 22.1
    assert finding.first_step == 1


def test_steps_without_load_neither_kill_nor_revive() -> None:
    dead, nothing = [[0, 133, 133, 134]], [[0, 0, 0, 0]]
    findings, begun = watch([dead, nothing, nothing, dead, dead], DEAD_ONLY)
    assert [len(found) for found in begun] == [0, 0, 0, 0, 1]
    assert findings[0].first_step == 1


def test_imbalance_is_reported_with_its_layer_and_what_chance_would_be() -> None:
    uneven = [250, 50, 50, 50]  # deviations 1.5, -0.5, -0.5, -0.5 of the mean: cv = sqrt(3 / 3) = 1
    findings, begun = watch([[EVEN, uneven]] * 3, layers=[1, 7])
    assert [len(found) for found in begun] == [0, 1, 0]
    (finding,) = findings
    # sqrt((1 - 2 / 4) * 4 / 400) = 0.07
    assert finding.text == (
        "layer 7: the standard deviation of its experts' loads has been 1.00 times their mean since step 1;"
        " by chance it would be 0.07"
    )
    assert (finding.kind, finding.layer, finding.last_step) == ("imbalance", 7, 3)


def test_imbalance_needs_the_routers_topk() -> None:
    assert watch([[[250, 50, 50, 50]]] * 5, topk=None)[0] == []


def test_imbalance_of_few_tokens_is_chance() -> None:
    # cv is 1, and 0.7 by chance; 4 assignments say no more than that.
    assert watch([[[2, 2, 0, 0]]] * 30, Thresholds(None, 0.5, None, 2), topk=1)[0] == []


def test_overload_is_of_the_whole_model() -> None:
    values = [1.6, 1.4, 1.6, 1.75, 1.0]
    findings, begun = watch([None] * 5, metrics=[{"train/moe/avg_overload_factor": value} for value in values])
    assert [len(found) for found in begun] == [0, 0, 0, 1, 0]
    (finding,) = findings
    assert finding.text == "the busiest expert-parallel rank has 1.75 times the work of the mean one since step 3"
    assert (finding.layer, finding.first_step, finding.last_step, finding.is_over) == (None, 3, 4, True)


def test_updates_left_out_are_reported_at_once() -> None:
    findings, begun = watch([None] * 3, metrics=[{"train/skipped_updates": value} for value in (0.0, 1.0, 0.0)])
    assert [len(found) for found in begun] == [0, 1, 0]
    assert findings[0].text.startswith("updates have been skipped since step 2")


def test_updates_left_out_every_other_step_are_reported_once() -> None:
    metrics = [{"train/skipped_updates": float(step % 2)} for step in range(1000)]
    (finding,), begun = watch([None] * 1000, metrics=metrics)
    assert sum(map(len, begun)) == 1
    assert (finding.first_step, finding.last_step, finding.is_over) == (2, 1000, False)
    assert finding.text.startswith("updates have been skipped since step 2:")


def test_a_router_loss_of_another_scale_is_found_at_once_and_holds_until_it_is_measured_again() -> None:
    wrong = {"train/moe/router_gradient/error_aux": 0.5, "train/moe/router_gradient/scale_aux": 0.5}
    right = {"train/moe/router_gradient/error_aux": 0.01, "train/moe/router_gradient/scale_aux": 1.01}
    findings, begun = watch([None] * 5, metrics=[right, wrong, {}, {}, right])
    (finding,) = findings
    assert (finding.kind, finding.first_step, finding.last_step, finding.is_over) == (
        "router_loss_gradient",
        2,
        4,
        True,
    )
    assert finding.text.startswith("the load balancing loss trains with 0.50 times its coefficient")
    assert [len(each) for each in begun] == [0, 1, 0, 0, 0]


def test_a_router_gradient_of_the_right_scale_may_be_another_and_a_rounded_one_is_judged_by_its_scale() -> None:
    def texts(**metrics: float) -> list[str]:
        named = {f"train/moe/router_gradient/{name}": value for name, value in metrics.items()}
        return [found.text for found in watch([None], metrics=[named])[0]]

    (other,) = texts(error_z=0.3, scale_z=1.01)
    assert other.startswith("the gradient of the z-loss at a router differs from its equation by 30% of its length")
    assert texts(scale_aux=1.3) == texts(scale_aux=0.7) == []
    assert len(texts(scale_aux=4.0)) == len(texts(scale_aux=0.0)) == 1


def test_a_number_that_is_none_is_no_finding() -> None:
    assert watch([None] * 4, metrics=[{"train/moe/avg_overload_factor": float("nan")}] * 4)[0] == []


def test_thresholds_can_be_off() -> None:
    metrics = [{"train/moe/avg_overload_factor": 9.0}] * 9
    assert watch([[[0, 0, 0, 4000]]] * 9, OFF, metrics=metrics)[0] == []


def test_findings_stand_in_the_order_in_which_they_began() -> None:
    findings, _ = watch([[EVEN, DEAD]] * 2 + [[DEAD, DEAD]] * 4, Thresholds(2, None, None, 1), layers=[0, 1])
    assert [(finding.layer, finding.first_step) for finding in findings] == [(1, 1), (0, 3)]


@settings(max_examples=examples(40))
@given(
    num_experts=st.sampled_from([2, 4, 8, 32]),
    topk=st.integers(1, 8),
    num_tokens=st.integers(1, 60),
    excess_cv=st.sampled_from([0.01, 0.3, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_random_routing_has_no_finding(
    num_experts: int, topk: int, num_tokens: int, excess_cv: float, seed: int
) -> None:
    topk = min(topk, num_experts)
    counts = random_counts(60, 3, num_experts, num_tokens, topk, seed)
    assert watch(list(counts), Thresholds(1, excess_cv, None, 1), topk=topk)[0] == []


def test_a_biased_router_is_distinguished_from_a_random_one() -> None:
    generator = np.random.default_rng(0)
    shares = np.full((2, 16), 1 / 16)
    shares[1, :4] *= 3
    counts = generator.multinomial(2000, shares / shares.sum(1, keepdims=True), size=(10, 2))
    findings, _ = watch(list(counts))
    assert [(finding.kind, finding.layer, finding.first_step) for finding in findings] == [("imbalance", 1, 1)]


SUDDEN = Thresholds(10, None, 1.5, 10, sudden_steps=2)


def test_an_expert_that_loses_its_tokens_at_once_is_reported_soon() -> None:
    _, begun = watch([[EVEN]] * 5 + [[DEAD]] * 12, SUDDEN)
    assert [step for step, found in enumerate(begun, 1) if found] == [7]
    assert begun[6][0].text == "layer 0: 1 of 4 experts dead since step 6; beyond sampling noise"


@pytest.mark.parametrize(
    ("before", "then"),
    [
        ([EVEN] * 2, DEAD),  # no level before
        ([[40, 120, 120, 120]] * 9, DEAD),  # it had less than half of its share
        ([[2, 2, 2, 2]] * 9, [0, 3, 3, 2]),  # chance
    ],
)
def test_an_expert_that_may_be_idle_has_the_usual_time(before: list[list[int]], then: list[int]) -> None:
    _, begun = watch([[counts] for counts in before] + [[then]] * 5, SUDDEN)
    assert not any(begun)


def test_experts_that_never_have_a_token_are_reported_soon_where_the_others_have_their_share() -> None:
    for counts, number in ((DEAD, 1), ([200, 0, 200, 0], 2)):
        _, begun = watch([[counts]] * 12, SUDDEN)
        assert [step for step, found in enumerate(begun, 1) if found] == [2]
        assert begun[1][0].text == f"layer 0: {number} of 4 experts dead since step 1; beyond sampling noise"


@pytest.mark.parametrize(
    ("counts", "reported"),
    [
        ([[0, 40, 180, 180]], 10),  # another one has less than half of its share: popularity may differ as much
        ([[0, 1, 1, 2]], None),  # chance
        ([EVEN, DEAD], None),  # it has had tokens
    ],
)
def test_experts_without_a_token_may_be_unpopular(counts: list[list[int]], reported: int | None) -> None:
    steps = [[counts[0]], *[[counts[-1]]] * 9]
    _, begun = watch(steps, SUDDEN)
    assert [step for step, found in enumerate(begun, 1) if found] == ([] if reported is None else [reported])


def test_overload_that_rises_at_once_is_reported_soon() -> None:
    factors = [1.1, 1.12, 1.08, 1.1, 1.11, 2.0, 1.1, 2.0, 2.0, 2.0]
    metrics = [{"train/moe/avg_overload_factor": factor} for factor in factors]
    _, begun = watch([None] * len(factors), SUDDEN, metrics=metrics)
    assert [step for step, found in enumerate(begun, 1) if found] == [9]
    high = [{"train/moe/avg_overload_factor": 1.9 + 0.01 * (step % 3)} for step in range(9)]
    _, begun = watch([None] * 9, SUDDEN, metrics=high)
    assert not any(begun), "it has always been so"
