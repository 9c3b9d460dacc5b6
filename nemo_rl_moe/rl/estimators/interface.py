# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Record of an advantage estimator, and the inputs of its function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nemo_rl_moe.rl.estimators.comparison import informative_groups

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from nemo_rl_moe.config.schema import GRPOMasterConfig
    from nemo_rl_moe.config.schema_grpo import AdvantageConfig


@dataclass(frozen=True)
class EstimatorInputs:
    """Responses of one step with their rewards. A group has the responses to one prompt.

    Attributes:
        rewards: Rewards after shaping and subtraction of a divergence. Failed responses have the value of
            `env.on_failure`.
        takes_part: True for responses that are compared and trained on. Advantages of other responses are not read.
        config: The section `grpo.adv_estimator`.
        named_rewards: Name -> rewards before they are added, for the names in `env.reward_weights`. Empty if it is not
            set.
        reward_weights: Weight of each named reward.
        group_ids: Identifier of each group's prompt.
        num_tokens: Number of sampled tokens of each response.
        token_mask: True at the sampled tokens of each response, at the positions of its full sequence.
        token_turns: Index of the turn of each sampled token, in order of time from 0, and -1 at other positions.
        turn_rewards: Rewards of turns from the environment. `rewards` include them. 0 after the last turn.
        score_norms: Squared norm of the gradient of each sampled token's log-probability by the logits, `1 - 2 pi +
            sum_v pi_v^2`. None unless the estimator needs it, and before a pass has computed it.
    """

    rewards: Float[Tensor, "groups generations"]
    takes_part: Bool[Tensor, "groups generations"]
    config: AdvantageConfig
    named_rewards: Mapping[str, Float[Tensor, "groups generations"]]
    reward_weights: Mapping[str, float]
    group_ids: tuple[str, ...]
    num_tokens: Int[Tensor, "groups generations"]
    token_mask: Bool[Tensor, "groups generations tokens"]
    token_turns: Int[Tensor, "groups generations tokens"]
    turn_rewards: Float[Tensor, "groups generations turns"]
    score_norms: Float[Tensor, "groups generations tokens"] | None = None


def rewards_differ(inputs: EstimatorInputs) -> Bool[Tensor, " groups"]:
    """Return which groups have responses with different rewards."""
    return informative_groups(inputs.rewards)


@dataclass(frozen=True)
class Estimator:
    """An estimator of advantages.

    Attributes:
        name: Name in `grpo.adv_estimator.name`.
        function: Function that returns an advantage for each response, or for each of its tokens,
            `[groups, generations, tokens]`.
        baseline: Responses with which a response is compared: its group, all of the step, or none.
        reads: Keys in `SWITCHES` that the estimator reads.
        reads_named_rewards: Whether the estimator reads the named rewards instead of their sum.
        of_tokens: Whether tokens of a sequence may have different advantages.
        needs_score_norms: Whether the estimator reads `score_norms`, for which a step has one more forward pass.
        is_informative: Function that returns which groups are worth training on. Dynamic sampling replaces other
            groups.
        rules: Checks of a configuration with this estimator. Each yields a line per problem.
    """

    name: str
    function: Callable[[EstimatorInputs], Tensor]
    baseline: Literal["group", "step", "none"] = "group"
    reads: frozenset[str] = frozenset()
    reads_named_rewards: bool = False
    of_tokens: bool = False
    needs_score_norms: bool = False
    is_informative: Callable[[EstimatorInputs], Bool[Tensor, " groups"]] = rewards_differ
    rules: tuple[Callable[[GRPOMasterConfig], Iterator[str]], ...] = ()


def rewards_are_not_scaled(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that `normalize_rewards` is off, for estimators that divide by no standard deviation."""
    chosen = config.grpo.adv_estimator
    if chosen.normalize_rewards:
        yield (
            f"grpo.adv_estimator.normalize_rewards: got true, expected false with grpo.adv_estimator.name"
            f" {chosen.name}, which divides by no standard deviation"
        )


SWITCHES: Mapping[str, bool | str] = {"use_leave_one_out_baseline": False, "normalize_over": "group"}
"""Key of `grpo.adv_estimator` that only some estimators read -> its value with other estimators."""
