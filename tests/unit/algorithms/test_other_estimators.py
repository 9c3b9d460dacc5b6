# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""MaxRL and the optimal token baseline by hand, and groups of equal rewards out of the loss."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from nemo_rl_moe.algorithms.advantages import compute_advantages
from nemo_rl_moe.algorithms.custom_estimator import KEY
from nemo_rl_moe.algorithms.grpo_batch import make_batch
from nemo_rl_moe.algorithms.logged_samples import ZERO_VARIANCE, logged_samples
from nemo_rl_moe.config.schema_grpo import AdvantageConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.rl.estimators import ESTIMATORS
from nemo_rl_moe.rl.estimators.interface import EstimatorInputs
from nemo_rl_moe.rollouts.source import RolloutGroups
from tests.support.grpo_fakes import PAD_TOKEN, small_config, trajectory
from tests.support.grpo_inputs import inputs_of_rewards
from tests.unit.algorithms.test_grpo_loop import Loop, rewards_of

UNSCALED = "grpo.adv_estimator.normalize_rewards=false"


def section(name: str) -> AdvantageConfig:
    keys = {"use_leave_one_out_baseline": False, "normalize_rewards": False, "normalize_over": "group"}
    return AdvantageConfig.model_validate(keys | {"name": name})


def advantages(name: str, rewards: list[list[float]], **changes: Tensor) -> Tensor:
    given = inputs_of_rewards(torch.tensor(rewards, dtype=torch.float64), section(name))
    return compute_advantages(ESTIMATORS[name], replace(given, **changes))  # type: ignore[arg-type]


class TestMaxRL:
    def test_differences_are_over_the_mean(self) -> None:
        found = advantages("maxrl", [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0], [0.0] * 4, [1.0] * 4])
        third = 1 / 3
        expected = [[3.0, -1.0, -1.0, -1.0], [third, third, -1.0, third], [0.0] * 4, [0.0] * 4]
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))

    def test_who_does_not_take_part_counts_in_no_mean(self) -> None:
        takes_part = torch.tensor([[True, True, True, False]])
        found = advantages("maxrl", [[1.0, 0.0, 0.5, -9.0]], takes_part=takes_part)
        torch.testing.assert_close(found, torch.tensor([[1.0, -1.0, 0.0, 0.0]], dtype=torch.float64))

    @pytest.mark.parametrize("size", [2, 3, 5])
    def test_the_expected_gradient_is_that_of_the_first_terms_of_log_p(self, size: int) -> None:
        """Over all outcomes of a policy that is right with probability p = sigmoid(theta)."""
        theta = torch.tensor(-0.4, dtype=torch.float64, requires_grad=True)
        p = theta.sigmoid()
        expected = -sum((1 - p) ** k / k for k in range(1, size))
        (wanted,) = torch.autograd.grad(expected, theta)
        total = 0.0
        for outcome in product([0.0, 1.0], repeat=size):
            found = advantages("maxrl", [list(outcome)])[0]
            chance = torch.stack([p.detach() if right else 1 - p.detach() for right in outcome]).prod()
            scores = torch.tensor([(1 - p.item()) if right else -p.item() for right in outcome], dtype=torch.float64)
            total += float(chance * (found * scores).mean())
        assert total == pytest.approx(wanted.item(), rel=1e-12)

    def test_a_negative_reward_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match=r"got maxrl and a reward of -0\.5, expected rewards of 0 or"):
            advantages("maxrl", [[1.0, -0.5]])


def otb_inputs(**changes: Tensor) -> EstimatorInputs:
    """Two groups of two responses of up to three tokens; the second response of each has one token less."""
    mask = torch.tensor([[[True, True, True], [True, True, False]]] * 2)
    rewards = torch.tensor([[1.0, 0.0], [0.5, 1.0]], dtype=torch.float64)
    norms = torch.tensor([[[0.5, 1.0, 0.2], [1.5, 0.5, 9.0]]] * 2, dtype=torch.float64)
    given = replace(
        inputs_of_rewards(rewards, section("optimal_token_baseline")),
        token_mask=mask,
        token_turns=torch.zeros(mask.shape, dtype=torch.long).where(mask, -1),
        score_norms=norms,
    )
    return replace(given, **changes)  # type: ignore[arg-type]


def otb(inputs: EstimatorInputs) -> Tensor:
    return compute_advantages(ESTIMATORS["optimal_token_baseline"], inputs)


class TestOptimalTokenBaseline:
    def test_the_baseline_weighs_returns_by_cumulative_norms(self) -> None:
        # Weights of the first token: 0.5 and 1.5. Of the second: 1.5 and 2.0. Nobody else has a third.
        first, second = 0.5 / 2.0, 1.5 / 3.5
        group = [[1 - first, 1 - second, 1.0], [-first, -second, 0.0]]
        other = [0.5 * 0.25 + 1.0 * 0.75, (0.5 * 1.5 + 1.0 * 2.0) / 3.5]
        expected = [group, [[0.5 - other[0], 0.5 - other[1], 0.5], [1 - other[0], 1 - other[1], 0.0]]]
        torch.testing.assert_close(otb(otb_inputs()), torch.tensor(expected, dtype=torch.float64))

    def test_rewards_of_turns_count_from_their_turn_on(self) -> None:
        turns = torch.tensor([[[0, 1, 1], [0, 1, -1]]] * 2)
        turn_rewards = torch.tensor([[[0.25, 0.0], [0.0, 0.0]]] * 2, dtype=torch.float64)
        found = otb(otb_inputs(token_turns=turns, turn_rewards=turn_rewards))
        # After the first token, 0.75 of the reward of 1 is left.
        second = 0.75 * 1.5 / 3.5
        expected = torch.tensor([[1 - 0.25, 0.75 - second, 0.75], [-0.25, -second, 0.0]], dtype=torch.float64)
        torch.testing.assert_close(found[0], expected)

    def test_tokens_of_others_do_not_count(self) -> None:
        """A token of the environment between two sampled ones, and conversations that are not in order of time."""
        plain = otb(otb_inputs())
        gap = torch.nn.functional.pad
        order = torch.tensor([2, 0, 1])

        def moved(values: Tensor, fill: float) -> Tensor:
            return gap(values, (1, 0), value=fill)[..., [1, 0, 2, 3]]

        given = otb_inputs()
        found = otb(
            replace(
                given,
                token_mask=moved(given.token_mask, False),
                token_turns=moved(given.token_turns, -1),
                score_norms=moved(given.score_norms, 7.0),  # type: ignore[arg-type]
            )
        )
        torch.testing.assert_close(found, moved(plain, 0.0))
        turns = torch.arange(3).expand(2, 2, 3).where(given.token_mask, -1)
        stored = {name: getattr(given, name)[..., order] for name in ("token_mask", "score_norms")}
        found = otb(otb_inputs(**stored, token_turns=turns[..., order]))
        torch.testing.assert_close(found, plain[..., order])

    def test_certain_tokens_weigh_alike_and_who_is_left_out_not_at_all(self) -> None:
        certain = otb(otb_inputs(score_norms=torch.zeros(2, 2, 3, dtype=torch.float64)))
        torch.testing.assert_close(certain[0, :, 0], torch.tensor([0.5, -0.5], dtype=torch.float64))
        alone = otb(otb_inputs(takes_part=torch.tensor([[True, False], [True, True]])))
        assert alone[0].tolist() == [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]
        torch.testing.assert_close(alone[1], otb(otb_inputs())[1])

    @pytest.mark.parametrize("norms", [None, torch.tensor([0.0, 0.3, 0.0, 1.7, 0.2], dtype=torch.float64)])
    def test_informative_groups_have_an_advantage_by_any_norms(self, norms: Tensor | None) -> None:
        """Only the longest of right responses has a fourth token. The mean of three rewards of 0.7 is rounded."""
        lengths = [[2, 4, 4], [2, 3, 4], [4, 1, 2], [4, 4, 4]]
        mask = torch.arange(5) < torch.tensor(lengths)[:, :, None]
        rewards = torch.tensor([[0.7] * 3, [1.0] * 3, [0.0] * 3, [1.0, 0.0, 1.0]], dtype=torch.float64)
        given = replace(
            inputs_of_rewards(rewards, section("optimal_token_baseline")),
            token_mask=mask,
            token_turns=torch.zeros(mask.shape, dtype=torch.long).where(mask, -1),
            score_norms=None if norms is None else norms.expand(mask.shape),
        )
        found = otb(given)
        assert found[1].tolist() == [pytest.approx([0, 0, 0, is_longest, 0], abs=1e-12) for is_longest in (0, 0, 1)]
        assert found[0].any(), "by rounding alone"
        assert ESTIMATORS["optimal_token_baseline"].is_informative(given).tolist() == [False, True, False, True]

    def test_rewards_of_turns_inform_if_their_sums_are_equal(self) -> None:
        turns = torch.tensor([[[0, 1, 1], [0, 1, -1]]] * 2)
        turn_rewards = torch.tensor([[[0.5, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]], dtype=torch.float64)
        mask = (turns >= 0) & (torch.arange(3) < 2)
        given = otb_inputs(
            rewards=torch.ones(2, 2, dtype=torch.float64), token_mask=mask, token_turns=turns.where(mask, -1)
        )
        is_informative = ESTIMATORS["optimal_token_baseline"].is_informative
        assert is_informative(replace(given, turn_rewards=turn_rewards)).tolist() == [True, False]

    def test_a_step_computes_the_norms_and_trains_on_the_advantages(self) -> None:
        config = small_config("grpo.max_num_steps=1", "grpo.adv_estimator.name=optimal_token_baseline", UNSCALED)
        loop = Loop(config)
        assert loop.diary.index("score_norms") < loop.diary.index("train")
        (batch,) = loop.policy.batches
        assert set(batch.columns) == {"advantages", "generation_logprobs"}
        found = batch.columns["advantages"].values
        assert found.shape == batch.token_mask.shape
        assert not found[~batch.token_mask].any()
        # The sampled tokens have norms of a hundredth of their ids (see the fake policy).
        rewards, first = rewards_of(loop), batch.token_mask.int().argmax(1)
        norms = batch.input_ids.gather(1, first[:, None]).view(2, 3) / 100
        baseline = (rewards * norms).sum(1, keepdim=True) / norms.sum(1, keepdim=True)
        torch.testing.assert_close(found.gather(1, first[:, None]).view(2, 3), (rewards - baseline).float())


class TestZeroVarianceFiltering:
    GROUPS = ([1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0])

    def groups(self) -> RolloutGroups:
        found = [trajectory(reward=reward) for group in self.GROUPS for reward in group]
        return RolloutGroups(found, found, num_generations=3, num_filled=0)

    @pytest.mark.parametrize("filters", [False, True])
    def test_groups_of_equal_rewards_count_in_no_mean(self, filters: bool) -> None:
        config = small_config(f"grpo.zero_variance_filtering={str(filters).lower()}")
        batch = make_batch(config, self.groups(), PAD_TOKEN, 0)
        trained = batch.token_mask.any(dim=1).view(3, 3).all(dim=1)
        assert trained.tolist() == [True, not filters, not filters]
        plain = make_batch(small_config(), self.groups(), PAD_TOKEN, 0)
        assert torch.equal(batch.columns["advantages"].values, plain.columns["advantages"].values)

    def test_advantages_in_groups_of_equal_rewards_are_trained_on(self) -> None:
        config = small_config("grpo.zero_variance_filtering=true", f"{KEY}=optimal_token_baseline", UNSCALED)
        lengths = [(2, 2, 4), (2, 4, 4)]
        found = [trajectory(response_ids=[5] * length, reward=1.0) for group in lengths for length in group]
        batch = make_batch(config, RolloutGroups(found, found, num_generations=3, num_filled=0), PAD_TOKEN, 0)
        assert batch.token_mask.sum(dim=1).tolist() == [2, 2, 4, 0, 0, 0]
        assert batch.columns["advantages"].values.sum(dim=1).tolist() == [0.0, 0.0, 2.0, 0.0, 0.0, 0.0]

    def test_samples_say_why(self) -> None:
        found = logged_samples(small_config("grpo.zero_variance_filtering=true"), self.groups())
        assert [one.left_out for one in found] == [""] * 3 + [ZERO_VARIANCE] * 6
