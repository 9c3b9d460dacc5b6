# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Trajectories: token sequences with a loss mask, and one reward for all of them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nemo_rl_moe.distributed.batch import ModelInput
from nemo_rl_moe.distributed.stored_rows import StoredRows
from nemo_rl_moe.models.images import ModelImage, images_in
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.runs.folder.conversations import ConversationTurn, RolloutTimes

FinishReason = Literal["stop", "length", "turns", "time"]
"""stop: ended by the model or the environment. length, turns, time: truncated at a limit on tokens, turns or time."""
NOT_SAMPLED = -1
"""Weight version of a token that no model sampled."""

KEPT_MASS = "sampling_kept_mass"
"""Metric of the probability mass that top-k and top-p leave: the mean over the sampled tokens of all trajectories."""
OVERLONG_METRIC = "env/num_overlong"
RETRIES_METRIC = "env/num_retries"
TURN_REWARDS_METRIC = "mean_turn_rewards_per_sample"
TRUNCATION_METRICS: Mapping[str, FinishReason] = {
    "truncation_rate_by_turns": "turns",
    "truncation_rate_by_time": "time",
}
"""Metrics with the shares of trajectories that were truncated at a limit on their turns or time."""


@dataclass(frozen=True)
class TokenSequence:
    """One sequence of tokens as the model has read and continued it, over any number of turns.

    It is not split into prompt and completion. The loss mask marks the tokens that are trained on.

    Attributes:
        loss_mask: True on tokens that are trained on, as targets.
        logprobs: Log-probability of each sampled token from the engine, in nats, 0 on all other tokens.
        weight_versions: Version (number of optimizer steps) of the weights that sampled each token, `NOT_SAMPLED` on
            all other tokens.
        routed_experts: Experts of each token in each MoE layer, `[moe_layers, topk]` int16 per token, from the first
            pass over the token. None if the engine does not report them.
        indexer_positions: Positions that each token sees in each layer with an indexer, `[layers, k]` int32 per token.
            None if the engine does not report them.
        model_inputs: Further inputs of the model, such as images.
        kept_tokens: Sampling mask of each sampled token. If present, `logprobs` are normalized over it. None if the
            engine was not asked for it.
    """

    token_ids: Int[np.ndarray, " tokens"]
    loss_mask: Bool[np.ndarray, " tokens"]
    logprobs: Float[np.ndarray, " tokens"]
    weight_versions: Int[np.ndarray, " tokens"]
    routed_experts: StoredRows | None = None
    indexer_positions: StoredRows | None = None
    model_inputs: Mapping[str, ModelInput] = field(default_factory=dict)
    kept_tokens: StoredRows | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens that the model sampled, end tokens included."""
        return int((self.weight_versions != NOT_SAMPLED).sum())


@dataclass(frozen=True)
class Trajectory:
    """The token sequences that a policy and an environment have made from a prompt, with one reward.

    A second sequence begins if new tokens do not continue the first one. Tokens that the second sequence repeats count
    as given, like a prompt: a sampled token is trained on once, in the sequence in which it was sampled.

    Attributes:
        sample_id: Source of its prompt, such as file and line.
        group_id: Id of the group. The trajectories of a group are compared with each other.
        sequences: At least one, in the order in which they began.
        reward: Finite number, which includes the rewards of turns.
        is_correct: Whether it counts as right in `accuracy`.
        num_turns: Number of the model's responses.
        num_retries: Number of failed attempts before this one.
        prompt_text, response_text: Texts for people to read.
        fault: Reason why the environment gave no reward. None if it gave one.
        fault_message: One line on the fault.
        overlong: Message on tokens of the environment that did not fit, so that the trajectory ended. Empty if all
            tokens did fit.
        rewards: Named rewards, of which `reward` is the weighted sum. Empty if a score is one number, or if there is no
            score.
        metrics: Further numbers of the environment, logged as means over trajectories.
        conversation: Turns of the prompt, the model and the environment, for people to read.
        times: Times of its generation and of its tools. None if they were not recorded.
        left_out: Reason why it is not trained on. Empty if it is trained on, and in validations.
        environment: Name in `env.mixture`. Empty if the run has one environment.
        turn_lengths: Number of sampled tokens of each turn, in the order of the sampled tokens of all sequences. Empty
            if unknown: then all tokens count as one turn.
        turn_order: Index in time of each turn of `turn_lengths`. Empty if `turn_lengths` is in the order of time.
        turn_rewards: Reward of each turn in the order of time, included in `reward`. Empty if none was given.
        answer: Final answer, as in `Score`.
    """

    sample_id: str
    group_id: str
    sequences: tuple[TokenSequence, ...]
    reward: float
    is_correct: bool
    finish_reason: FinishReason
    num_turns: int = 1
    num_retries: int = 0
    prompt_text: str = ""
    response_text: str = ""
    fault: Fault | None = None
    fault_message: str = ""
    overlong: str = ""
    rewards: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    conversation: tuple[ConversationTurn, ...] = ()
    times: RolloutTimes | None = field(default=None, compare=False)
    left_out: str = ""
    environment: str = ""
    turn_lengths: tuple[int, ...] = ()
    turn_order: tuple[int, ...] = ()
    turn_rewards: tuple[float, ...] = ()
    answer: str = ""

    @property
    def is_truncated(self) -> bool:
        """Whether it was truncated at a limit on its tokens."""
        return self.finish_reason == "length"

    @property
    def num_sequences(self) -> int:
        return len(self.sequences)

    @property
    def last_sequence(self) -> TokenSequence:
        """The sequence of the last response. It need not be the last in `sequences`, as conversations may alternate."""
        if not self.turn_order:
            return self.sequences[-1]
        last = self.turn_order.index(max(self.turn_order))
        first_token = sum(self.turn_lengths[:last])
        ends = accumulate(sequence.num_sampled_tokens for sequence in self.sequences)
        return next(each for each, end in zip(self.sequences, ends, strict=True) if end > first_token)

    @property
    def longest_response(self) -> int:
        return max(self.turn_lengths, default=self.num_sampled_tokens)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.sequences))

    @property
    def num_sampled_tokens(self) -> int:
        return sum(sequence.num_sampled_tokens for sequence in self.sequences)

    @property
    def weight_version(self) -> int:
        """Version of the newest weights that sampled a token, `NOT_SAMPLED` without sampled tokens."""
        return max(int(sequence.weight_versions.max(initial=NOT_SAMPLED)) for sequence in self.sequences)

    @property
    def images(self) -> list[ModelImage]:
        """Images that the model was shown. Images that a later sequence repeats are listed once."""
        first, *later = (images_in(sequence.model_inputs) for sequence in self.sequences)
        shown = {image.digest for image in first} if later else set()
        new = {image.digest: image for images in later for image in images if image.digest not in shown}
        return [*first, *new.values()]


def sequences_of(trajectories: Sequence[Trajectory]) -> list[TokenSequence]:
    """Return the sequences of all trajectories. Each sequence is a row of the training batch."""
    return [sequence for trajectory in trajectories for sequence in trajectory.sequences]


def rows_of(trajectories: Sequence[Trajectory]) -> list[range]:
    """Return for each trajectory its rows in the batch, which has one row per sequence."""
    ends = np.cumsum([trajectory.num_sequences for trajectory in trajectories]).tolist()
    return [range(end - trajectory.num_sequences, end) for trajectory, end in zip(trajectories, ends, strict=True)]


def trajectory_of_each_sequence(trajectories: Sequence[Trajectory]) -> list[int]:
    """Return for each sequence (row of the training batch) the index of its trajectory."""
    return [index for index, trajectory in enumerate(trajectories) for _ in trajectory.sequences]


def environments_in(trajectories: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
    """Return the trajectories of each environment by its name, in their order."""
    found: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        found.setdefault(trajectory.environment, []).append(trajectory)
    return found


def group_rewards(trajectories: Sequence[Trajectory], num_generations: int) -> Float[Tensor, "groups generations"]:
    """Return the rewards of the environment as float64, one row per group."""
    return torch.tensor([each.reward for each in trajectories], dtype=torch.float64).view(-1, num_generations)


def group_named_rewards(
    trajectories: Sequence[Trajectory], num_generations: int, names: Iterable[str]
) -> Float[Tensor, "names groups generations"]:
    """Return the named rewards of the environment as float64, one row per group, 0 for failed trajectories."""
    rewards = [[trajectory.rewards.get(name, 0.0) for trajectory in trajectories] for name in names]
    return torch.tensor(rewards, dtype=torch.float64).view(len(rewards), -1, num_generations)


def group_turn_rewards(
    trajectories: Sequence[Trajectory], num_generations: int
) -> Float[Tensor, "groups generations turns"]:
    """Return the rewards of turns as float64, one row per group, 0 for turns without one."""
    num_turns = max(1, *(max(len(each.turn_lengths), len(each.turn_rewards)) for each in trajectories))
    found = torch.zeros(len(trajectories), num_turns, dtype=torch.float64)
    for row, trajectory in enumerate(trajectories):
        found[row, : len(trajectory.turn_rewards)] = torch.tensor(trajectory.turn_rewards, dtype=torch.float64)
    return found.view(-1, num_generations, num_turns)


def group_correctness(trajectories: Sequence[Trajectory], num_generations: int) -> Bool[Tensor, "groups generations"]:
    """Return the correctness of each trajectory, one row per group."""
    return torch.tensor([each.is_correct for each in trajectories]).view(-1, num_generations)


def group_sampled_tokens(trajectories: Sequence[Trajectory], num_generations: int) -> Int[Tensor, "groups generations"]:
    """Return the number of sampled tokens of each trajectory, one row per group."""
    return torch.tensor([each.num_sampled_tokens for each in trajectories]).view(-1, num_generations)


def group_longest_responses(
    trajectories: Sequence[Trajectory], num_generations: int
) -> Int[Tensor, "groups generations"]:
    """Return the number of tokens of the longest response of each trajectory, one row per group."""
    return torch.tensor([each.longest_response for each in trajectories]).view(-1, num_generations)


def rollout_metrics(
    trajectories: Sequence[Trajectory], counted: Sequence[Trajectory] | None = None
) -> dict[str, float]:
    """Return metrics that do not depend on groups. Training and validation report the same ones.

    Over all trajectories, of which unscored ones count as not correct:

    - `accuracy`, `truncation_rate`, `mean_gen_tokens_per_sample`, `max_gen_tokens_per_sample` (sampled tokens)
    - if a trajectory has several turns: `mean_turns_per_sample`
    - if a trajectory has several turns, or if the rate is above 0: `truncation_rate_by_turns`,
      `truncation_rate_by_time`
    - if a trajectory has several sequences: `mean_sequences_per_sample`
    - if the number is above 0: `env/num_overlong` (trajectories in which tokens of the environment did not fit),
      `env/num_retries` (failed attempts)
    - means of the environment's metrics

    Over trajectories whose rewards count, if there are any: `reward`, `reward_std`, and for each named reward
    `rewards/NAME/mean` and `rewards/NAME/std`. `reward` is the weighted sum of the named means.

    Args:
        counted: Trajectories whose rewards count. None for all.
    """
    lengths = np.array([trajectory.num_sampled_tokens for trajectory in trajectories])
    metrics = _reward_metrics(trajectories if counted is None else counted) | {
        "accuracy": float(np.mean([trajectory.is_correct for trajectory in trajectories])),
        "mean_gen_tokens_per_sample": float(lengths.mean()),
        "max_gen_tokens_per_sample": float(lengths.max()),
        "truncation_rate": float(np.mean([trajectory.is_truncated for trajectory in trajectories])),
    }
    turns = [trajectory.num_turns for trajectory in trajectories]
    if max(turns) > 1:
        metrics["mean_turns_per_sample"] = float(np.mean(turns))
    for name, reason in TRUNCATION_METRICS.items():
        if (is_cut := [trajectory.finish_reason == reason for trajectory in trajectories]) and (
            any(is_cut) or max(turns) > 1
        ):
            metrics[name] = float(np.mean(is_cut))
    if len(sequences_of(trajectories)) > len(trajectories):
        metrics["mean_sequences_per_sample"] = float(np.mean([each.num_sequences for each in trajectories]))
    if num_overlong := sum(bool(trajectory.overlong) for trajectory in trajectories):
        metrics[OVERLONG_METRIC] = float(num_overlong)
    if num_retries := sum(trajectory.num_retries for trajectory in trajectories):
        metrics[RETRIES_METRIC] = float(num_retries)
    for name in dict.fromkeys(name for trajectory in trajectories for name in trajectory.metrics):
        having = [trajectory for trajectory in trajectories if name in trajectory.metrics]
        weights = [trajectory.num_sampled_tokens if name == KEPT_MASS else 1 for trajectory in having]
        metrics[name] = float(np.average([trajectory.metrics[name] for trajectory in having], weights=weights))
    return metrics


def _reward_metrics(counted: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean and deviation of the reward and of each named reward. Empty without trajectories."""
    if not counted:
        return {}
    rewards = np.array([trajectory.reward for trajectory in counted])
    metrics = {"reward": float(rewards.mean()), "reward_std": _sample_deviation(rewards)}
    if any(trajectory.turn_rewards for trajectory in counted):
        metrics[TURN_REWARDS_METRIC] = float(np.mean([math.fsum(trajectory.turn_rewards) for trajectory in counted]))
    of_environments = environments_in(counted)
    for name in dict.fromkeys(name for trajectory in counted for name in trajectory.rewards):
        # Environments may give different rewards. A mean is over the environments that give this one.
        givers = [own for own in of_environments.values() if any(name in trajectory.rewards for trajectory in own)]
        named = np.array([trajectory.rewards.get(name, 0.0) for own in givers for trajectory in own])
        metrics[f"rewards/{name}/mean"] = float(named.mean())
        metrics[f"rewards/{name}/std"] = _sample_deviation(named)
    return metrics


def _sample_deviation(values: Float[np.ndarray, " values"]) -> float:
    """Return the sample standard deviation, 0 for one value."""
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
