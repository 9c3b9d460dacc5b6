# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Experts by advantage: chance by brute force over all permutations, and the counts that it is about."""

from collections.abc import Iterator
from itertools import permutations, product

import pytest
import torch

from nemo_rl_moe.routing.metrics.routing_advantage import (
    TrainedResponses,
    add_sequence_assignments,
    advantage_metrics,
    advantage_scores,
    beyond_length,
    centred,
    joined_by_sample,
    permutation_moments,
    sums_of_groups,
)
from tests.support.quick_list import full

GENERATOR = torch.Generator().manual_seed(4)
COUNTS = torch.randint(0, 9, (7, 3, 4), generator=GENERATOR).double()
ADVANTAGES = torch.tensor([1.0, -0.5, 0.25, -1.5, 0.75, 2.0, -0.3], dtype=torch.float64)
ONE_GROUP = torch.zeros(7, dtype=torch.long)
GROUPS = torch.tensor([2, 0, 2, 2, 0, 5, 0])


def all_permutations(groups: torch.Tensor) -> Iterator[torch.Tensor]:
    """Advantages that have changed places within their groups, in every way."""
    members = [(groups == group).nonzero()[:, 0].tolist() for group in groups.unique()]
    for orders in product(*(permutations(of_group) for of_group in members)):
        permuted = ADVANTAGES.clone()
        for of_group, order in zip(members, orders, strict=True):
            permuted[of_group] = ADVANTAGES[list(order)]
        yield permuted


@pytest.mark.parametrize("groups", [ONE_GROUP, GROUPS], ids=["one group", "three groups"])
def test_mean_and_variance_are_those_of_all_permutations(groups: torch.Tensor) -> None:
    numbers = groups.unique(return_inverse=True)[1]
    counts, advantages = COUNTS[:, 0], centred(ADVANTAGES, numbers)
    off_mean = counts - sums_of_groups(counts, numbers) / advantages.sizes[:, None]
    above, variance = permutation_moments(off_mean, advantages)
    sums = torch.stack([permuted @ COUNTS[:, 0] for permuted in all_permutations(groups)])
    assert len(sums) == (5040 if groups is ONE_GROUP else 36)
    torch.testing.assert_close(above, ADVANTAGES @ counts - sums.mean(0))
    torch.testing.assert_close(variance, sums.var(0, unbiased=False))


@pytest.mark.parametrize("groups", [full(ONE_GROUP), GROUPS], ids=["one group", "three groups"])
def test_by_chance_the_excess_is_zero(groups: torch.Tensor) -> None:
    every = [
        advantage_metrics(advantage_scores(COUNTS, permuted, groups)[0], (0, 1, 2), per_layer=True)
        for permuted in list(all_permutations(groups))
    ]
    for name in ("excess", "excess_layer_2"):
        mean = sum(metrics[f"routing_advantage/{name}"] for metrics in every) / len(every)
        assert mean == pytest.approx(0, abs=1e-9)


def test_groups_whose_routing_differs_need_permutations_within_them() -> None:
    """Prompts are routed each in its own way, and advantages are centred in each: that is no preference."""
    generator = torch.Generator().manual_seed(2)
    of_prompt = torch.randint(0, 100, (64, 1, 3, 8), generator=generator)
    counts = (of_prompt + torch.randint(0, 10, (64, 8, 3, 8), generator=generator)).flatten(0, 1).double()
    advantages = torch.randn(64, 8, generator=generator)
    advantages = (advantages - advantages.mean(1, keepdim=True)).flatten()
    groups = torch.arange(64).repeat_interleave(8)

    def excess(groups: torch.Tensor) -> float:
        metrics = advantage_metrics(advantage_scores(counts, advantages, groups)[0], (0, 1, 2), per_layer=False)
        return metrics["routing_advantage/excess"]

    # 24 squares of about normal numbers: their mean is uncertain by 0.3.
    assert abs(excess(groups)) < 0.9
    assert excess(torch.zeros_like(groups)) < -0.9


def test_an_expert_that_serves_the_good_is_found() -> None:
    counts = torch.full((40, 2, 4), 5.0)
    advantages = torch.tensor([1.0, -1.0] * 20)
    counts[::2, 1, 3], counts[::2, 1, 2] = 7.0, 3.0
    scores = advantage_scores(counts, advantages, torch.zeros(40, dtype=torch.long))[0]
    assert scores[0].isnan().all(), "all sequences use these alike"
    # S = 20 (7 - 5), E = 0, Var = 40 * 40 / 39.
    assert scores[1, 3] == pytest.approx(40 / (1600 / 39) ** 0.5)
    assert scores[1, 2] == -scores[1, 3]
    metrics = advantage_metrics(scores, (4, 6), per_layer=True)
    assert metrics["routing_advantage/max_abs_z"] == metrics["routing_advantage/max_abs_z_layer_6"] == scores[1, 3]
    assert metrics["routing_advantage/excess"] == pytest.approx(39 - 1)
    assert not any(name.endswith("layer_4") for name in metrics)


def test_an_advantage_that_goes_with_length_is_no_preference() -> None:
    """Long responses are good ones, and all use the experts alike: of shares there is nothing, to the last bit."""
    lengths = torch.tensor([7, 3, 9, 11, 2, 8, 5]).double()
    counts = lengths[:, None, None] * torch.tensor([[3.0, 1, 0, 5], [1, 1, 1, 1]], dtype=torch.float64)
    by_number, _ = advantage_scores(counts, lengths, ONE_GROUP)
    assert by_number[0, 0] == pytest.approx(6**0.5)  # a correlation of 1: sqrt(m - 1)
    for groups in (ONE_GROUP, GROUPS):
        assert advantage_scores(counts, lengths, groups)[1].isnan().all()


@pytest.mark.parametrize("groups", [full(ONE_GROUP), GROUPS], ids=["one group", "three groups"])
def test_shares_are_compared_with_those_of_the_group(groups: torch.Tensor) -> None:
    counts = COUNTS[:, 1]
    beyond = beyond_length(counts, sums_of_groups(counts, groups.unique(return_inverse=True)[1]))
    for row, group in enumerate(groups.tolist()):
        of_group = counts[groups == group]
        expected = counts[row] - counts[row].sum() * of_group.sum(0) / of_group.sum()
        torch.testing.assert_close(beyond[row], expected)
    every = [
        advantage_metrics(advantage_scores(COUNTS, permuted, groups)[1], (0, 1, 2), per_layer=False, of_shares=True)[
            "routing_advantage/excess_of_shares"
        ]
        for permuted in all_permutations(groups)
    ]
    assert sum(every) / len(every) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("groups", [ONE_GROUP, GROUPS])
def test_equal_advantages_say_nothing(groups: torch.Tensor) -> None:
    # The mean of seven times 0.1 is not 0.1 to the last bit.
    for scores in advantage_scores(COUNTS, torch.full((7,), 0.1), groups):
        assert advantage_metrics(scores, (0, 1, 2), per_layer=True) == {}


def test_groups_of_one_are_one_group() -> None:
    """Responses of which no two have the same prompt are compared with each other."""
    alone, _ = advantage_scores(COUNTS, ADVANTAGES, torch.arange(7) * 3)
    torch.testing.assert_close(alone, advantage_scores(COUNTS, ADVANTAGES, ONE_GROUP)[0])


@pytest.mark.parametrize("as_map", [True, False])
def test_assignments_are_counted_by_sequence(as_map: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    routed = torch.rand(20, 6, generator=generator).topk(2).indices
    rows = torch.randint(0, 4, (20,), generator=generator)
    counts = torch.zeros(4, 3, 6, dtype=torch.int32)
    given = torch.zeros(20, 6, dtype=torch.bool).scatter_(1, routed, True) if as_map else routed
    for _ in range(2):
        add_sequence_assignments(counts, 1, given, rows)
    expected = torch.zeros_like(counts)
    for row, experts in zip(rows.tolist(), routed.tolist(), strict=True):
        for expert in experts:
            expected[row, 1, expert] += 2
    assert torch.equal(counts, expected)


def test_the_sequences_of_a_response_are_one_observation() -> None:
    """A conversation that began anew twice has one reward; its three sequences are no three responses."""
    counts = torch.tensor([[[4, 0]], [[1, 1]], [[0, 2]], [[3, 0]], [[0, 5]], [[2, 2]]]).double()
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, 0.5, -0.5], dtype=torch.float64)
    groups, samples = torch.zeros(6, dtype=torch.long), torch.tensor([7, 7, 7, 2, 4, 5])
    num_tokens = counts.sum((1, 2))
    joined = joined_by_sample(TrainedResponses(counts, advantages, groups), num_tokens, samples)
    # By number of the sample: 2, 4, 5, and 7 with the sum of three.
    assert joined.counts.tolist() == [[[3.0, 0.0]], [[0.0, 5.0]], [[2.0, 2.0]], [[5.0, 3.0]]]
    assert joined.advantages.tolist() == [-1.0, 0.5, -0.5, 1.0]
    # S = sum a n = -3 + 0 - 1 + 5 = 1 of the first expert, whose counts are 2.5 in the mean. Advantages have mean 0 and
    # squares 2.5 in all; counts off the mean have the squares 0.25, 6.25, 0.25 and 6.25: Var = 2.5 * 13 / 3.
    score = advantage_scores(*joined)[0][0, 0]
    assert float(score) == pytest.approx(1 / (2.5 * 13 / 3) ** 0.5)


def test_the_advantage_of_a_response_is_the_mean_over_its_trained_tokens() -> None:
    counts, groups = torch.ones(3, 1, 2), torch.zeros(3, dtype=torch.long)
    advantages = torch.tensor([0.1, 0.4, 0.1])
    joined = joined_by_sample(TrainedResponses(counts, advantages, groups), torch.tensor([3.0, 1.0, 5.0]), groups)
    assert joined.advantages.tolist() == pytest.approx([(0.3 + 0.4 + 0.5) / 9])
    equal = joined_by_sample(
        TrainedResponses(counts, torch.full((3,), 0.1), groups), torch.tensor([3.0, 1.0, 5.0]), groups
    )
    assert equal.advantages.tolist() == [torch.tensor(0.1).double().item()], "to the last bit"
