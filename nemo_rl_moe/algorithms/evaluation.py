# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Estimates of a policy's quality from its responses to held-out prompts, each with a standard error."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nemo_rl_moe.algorithms.grpo_metrics import pass_at_k, values_of_k
from nemo_rl_moe.rollouts.failed_responses import FailureRule, scored_responses
from nemo_rl_moe.rollouts.trajectory import Trajectory, group_correctness, group_rewards


@dataclass(frozen=True)
class Estimate:
    """Estimated mean over a distribution of prompts, from a sample of prompts.

    Attributes:
        standard_error: Standard deviation of the mean. None with one prompt, since one prompt shows no variation.
    """

    mean: float
    standard_error: float | None

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" ± {self.standard_error:.4f}"
        return f"{self.mean:.4f}{error}"


@dataclass(frozen=True)
class EvaluationSummary:
    """Estimates of one evaluation.

    Attributes:
        reward: Mean reward of a response, if any could be scored.
        pass_at_k: `k` -> probability that at least one of `k` responses passes. For `k` = 1 it is the accuracy.
        majority: Probability that the most frequent answer of the `n` responses passes. None with one response, or if
            the reward function reads no answers.
    """

    reward: Estimate | None
    accuracy: Estimate
    pass_at_k: dict[int, Estimate]
    majority: Estimate | None = None


def estimate(of_prompts: Float[Tensor, " prompts"]) -> Estimate:
    """Return the mean over prompts, and its standard error.

    Prompts are independent samples, but responses to one prompt are similar, so the mean of a prompt's responses counts
    as one observation. The error is `s / sqrt(n)` with the sample standard deviation `s` of `n` prompts (the clustered
    standard error of Miller, https://arxiv.org/abs/2411.00640, for clusters of equal size).
    """
    values = of_prompts.double()
    number = len(values)
    error = float(values.std(correction=1)) / math.sqrt(number) if number > 1 else None
    return Estimate(float(values.mean()), error)


def passes(
    trajectories: Sequence[Trajectory], num_generations: int, threshold: float | None
) -> Bool[Tensor, "prompts generations"]:
    """Return which responses pass. Responses that the environment failed to score do not pass.

    Args:
        trajectories: Group after group.
        threshold: Least reward of a passing response. None uses the environment's judgement.
    """
    if threshold is None:
        return group_correctness(trajectories, num_generations)
    is_scored = scored_responses(trajectories, num_generations)
    return (group_rewards(trajectories, num_generations) >= threshold) & is_scored


def summarise_evaluation(
    trajectories: Sequence[Trajectory], num_generations: int, threshold: float | None, failures: FailureRule
) -> EvaluationSummary:
    """Return the estimates from trajectories.

    Args:
        trajectories: Group after group.
        num_generations: Number of responses to each prompt, `n`. pass@k is reported for 1, the powers of two up to `n`,
            and `n`.
        threshold: Least reward of a passing response. None uses the environment's judgement.
    """
    passed = passes(trajectories, num_generations, threshold)
    counts = passed.sum(dim=1)
    ks = (1, *values_of_k(num_generations))
    return EvaluationSummary(
        reward=estimate(rewards) if len(rewards := _mean_rewards(trajectories, num_generations, failures)) else None,
        accuracy=estimate(passed.double().mean(dim=1)),
        pass_at_k={k: estimate(pass_at_k(counts, num_generations, k)) for k in ks},
        majority=_majority(trajectories, passed),
    )


def _majority(trajectories: Sequence[Trajectory], passed: Bool[Tensor, "prompts generations"]) -> Estimate | None:
    """Return the estimate of majority votes (Wang et al., arXiv:2203.11171)."""
    num_generations = passed.shape[1]
    if num_generations == 1 or not any(trajectory.answer for trajectory in trajectories):
        return None
    answers = [trajectory.answer for trajectory in trajectories]
    votes = [
        majority_passes(answers[row * num_generations : (row + 1) * num_generations], of_prompt)
        for row, of_prompt in enumerate(passed.tolist())
    ]
    return estimate(torch.tensor(votes, dtype=torch.float64))


def majority_passes(answers: Sequence[str], passed: Sequence[bool]) -> float:
    """Return the probability that the most frequent of a prompt's answers passes, with ties broken at random.

    An answer passes if any response with it does. Empty answers are not counted. Without any answer the result is 0.
    """
    votes = Counter(filter(None, answers))
    if not votes:
        return 0.0
    most = max(votes.values())
    first = [answer for answer, count in votes.items() if count == most]
    right = {answer for answer, passes in zip(answers, passed, strict=True) if passes}
    return sum(answer in right for answer in first) / len(first)


def _mean_rewards(
    trajectories: Sequence[Trajectory], num_generations: int, failures: FailureRule
) -> Float[Tensor, " prompts"]:
    """Return each prompt's mean reward over the responses that `failures` counts. Prompts without any are omitted."""
    groups = [trajectories[start : start + num_generations] for start in range(0, len(trajectories), num_generations)]
    counted = [[found.reward for found in failures.counted(group)] for group in groups]
    return torch.tensor([sum(rewards) / len(rewards) for rewards in counted if rewards], dtype=torch.float64)
