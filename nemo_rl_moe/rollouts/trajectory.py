# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Trajectories: token sequences with a mask of what is trained on, and one reward for all of them."""

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
"""stop: the model or the environment ended it; length: it was truncated at a limit on its tokens; turns: at a limit on
its turns; time: at a limit on its time."""
NOT_SAMPLED = -1
"""Weight version of a token that no model sampled."""

KEPT_MASS = "sampling_kept_mass"
"""Metric of what top-k and top-p leave to draw from: of a trajectory, and of several, a mean over sampled tokens."""
OVERLONG_METRIC = "env/num_overlong"
RETRIES_METRIC = "env/num_retries"
TURN_REWARDS_METRIC = "mean_turn_rewards_per_sample"
TRUNCATION_METRICS: Mapping[str, FinishReason] = {
    "truncation_rate_by_turns": "turns",
    "truncation_rate_by_time": "time",
}
"""Shares of trajectories that were truncated at another limit than one on their tokens."""


@dataclass(frozen=True)
class TokenSequence:
    """One sequence of tokens as a model has read and continued it, over any number of turns.

    There is no split into prompt and completion: the mask says which tokens are trained on.

    Attributes:
        token_ids: The whole sequence.
        loss_mask: True on tokens that are trained on, as targets.
        logprobs: Log-probability of each sampled token by the engine that sampled it, in nats; 0 on all other tokens.
        weight_versions: Optimizer steps of the weights that sampled each token; `NOT_SAMPLED` on all other tokens.
        routed_experts: Experts of each token in each MoE layer, `[moe_layers, topk]` int16 a token, as the pass chose
            them that first saw it; None where no engine reports them.
        model_inputs: Further inputs of the model, such as images.
        kept_tokens: Tokens that top-k and top-p had left to draw each sampled one from, over which `logprobs` are then;
            None where the engine was not asked for them.
    """

    token_ids: Int[np.ndarray, " tokens"]
    loss_mask: Bool[np.ndarray, " tokens"]
    logprobs: Float[np.ndarray, " tokens"]
    weight_versions: Int[np.ndarray, " tokens"]
    routed_experts: StoredRows | None = None
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
    """What a policy and an environment have made together: one sequence or several, with one reward.

    Several where a sequence does not continue the one before. What a later sequence repeats of an earlier one counts as
    given in it, as a prompt does: a sampled token is trained on in the sequence in which it was sampled, once.

    Attributes:
        sample_id: Where its prompt came from.
        group_id: Trajectories of one group are compared with each other; the others of its group have the same.
        sequences: At least one, in the order in which they began.
        reward: What it is worth, the rewards of its turns included; finite.
        is_correct: Whether it counts as right in `accuracy`.
        finish_reason: Why it ended.
        num_turns: Responses of the model.
        num_retries: Failed attempts before it.
        prompt_text: What was asked, for the eye.
        response_text: What came of it, for the eye.
        fault: Why the environment gave no reward; None where it did.
        fault_message: What went wrong, in one line.
        overlong: Message about tokens of the environment that did not fit, before which it ended; empty where all did.
        rewards: Several rewards by name, of which `reward` is the weighted sum; empty where there is one number, and
            where the environment gave none.
        metrics: Further numbers of the environment, logged as means over trajectories.
        conversation: Its turns, for the eye: the prompt's, those of the model and those of the environment.
        times: What it did when; None: nobody noted it.
        left_out: Why it is not trained on; empty where it is, and where nothing is, as in a validation.
        environment: Name in `env.mixture`; empty where a run has one environment.
        turn_lengths: Sampled tokens of each turn, in the order of the sampled tokens of all sequences; empty where it
            is not known, and taken for one turn.
        turn_order: Number in time, from 0, of each turn of `turn_lengths`; empty where that is their order.
        turn_rewards: Reward of each turn in the order of time, which `reward` includes; empty where none was given.
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

    @property
    def is_truncated(self) -> bool:
        """True when it was truncated at a limit on its tokens."""
        return self.finish_reason == "length"

    @property
    def num_sequences(self) -> int:
        """Number of its sequences."""
        return len(self.sequences)

    @property
    def last_sequence(self) -> TokenSequence:
        """The sequence of the last response: a conversation that began before another may go on after it."""
        if not self.turn_order:
            return self.sequences[-1]
        last = self.turn_order.index(max(self.turn_order))
        first_token = sum(self.turn_lengths[:last])
        ends = accumulate(sequence.num_sampled_tokens for sequence in self.sequences)
        return next(each for each, end in zip(self.sequences, ends, strict=True) if end > first_token)

    @property
    def longest_response(self) -> int:
        """Number of tokens of its longest response."""
        return max(self.turn_lengths, default=self.num_sampled_tokens)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return sum(map(len, self.sequences))

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens that the model sampled, end tokens included."""
        return sum(sequence.num_sampled_tokens for sequence in self.sequences)

    @property
    def weight_version(self) -> int:
        """Optimizer steps of the newest weights that sampled a token; `NOT_SAMPLED` where none did."""
        return max(int(sequence.weight_versions.max(initial=NOT_SAMPLED)) for sequence in self.sequences)

    @property
    def images(self) -> list[ModelImage]:
        """Images that the model was shown; none for text. Those that a later sequence repeats come once."""
        first, *later = (images_in(sequence.model_inputs) for sequence in self.sequences)
        shown = {image.digest for image in first} if later else set()
        new = {image.digest: image for images in later for image in images if image.digest not in shown}
        return [*first, *new.values()]


def sequences_of(trajectories: Sequence[Trajectory]) -> list[TokenSequence]:
    """Return the sequences of trajectories, one after another: the rows of their batch."""
    return [sequence for trajectory in trajectories for sequence in trajectory.sequences]


def rows_of(trajectories: Sequence[Trajectory]) -> list[range]:
    """Return the rows of each trajectory in their batch."""
    ends = np.cumsum([trajectory.num_sequences for trajectory in trajectories]).tolist()
    return [range(end - trajectory.num_sequences, end) for trajectory, end in zip(trajectories, ends, strict=True)]


def trajectory_of_each_sequence(trajectories: Sequence[Trajectory]) -> list[int]:
    """Return the index of the trajectory of each row in their batch."""
    return [index for index, trajectory in enumerate(trajectories) for _ in trajectory.sequences]


def environments_in(trajectories: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
    """Return the trajectories of each environment, in their order."""
    found: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        found.setdefault(trajectory.environment, []).append(trajectory)
    return found


def group_rewards(trajectories: Sequence[Trajectory], num_generations: int) -> Float[Tensor, "groups generations"]:
    """Return the rewards as the environment gave them, one row a group; float64."""
    rewards = [trajectory.reward for trajectory in trajectories]
    return torch.tensor(rewards, dtype=torch.float64).view(-1, num_generations)


def group_named_rewards(
    trajectories: Sequence[Trajectory], num_generations: int, names: Iterable[str]
) -> Float[Tensor, "names groups generations"]:
    """Return the named rewards as the environment gave them, one row a group; float64. Where it failed they are 0."""
    rewards = [[trajectory.rewards.get(name, 0.0) for trajectory in trajectories] for name in names]
    return torch.tensor(rewards, dtype=torch.float64).view(len(rewards), -1, num_generations)


def group_turn_rewards(
    trajectories: Sequence[Trajectory], num_generations: int
) -> Float[Tensor, "groups generations turns"]:
    """Return the rewards of turns as the environment gave them, one row a group; float64, 0 where it gave none."""
    num_turns = max(
        1, *(len(each.turn_lengths) for each in trajectories), *(len(each.turn_rewards) for each in trajectories)
    )
    found = torch.zeros(len(trajectories), num_turns, dtype=torch.float64)
    for row, trajectory in enumerate(trajectories):
        found[row, : len(trajectory.turn_rewards)] = torch.tensor(trajectory.turn_rewards, dtype=torch.float64)
    return found.view(-1, num_generations, num_turns)


def group_correctness(trajectories: Sequence[Trajectory], num_generations: int) -> Bool[Tensor, "groups generations"]:
    """Return the correctness of each trajectory, one row a group."""
    return torch.tensor([trajectory.is_correct for trajectory in trajectories]).view(-1, num_generations)


def group_sampled_tokens(trajectories: Sequence[Trajectory], num_generations: int) -> Int[Tensor, "groups generations"]:
    """Return the number of sampled tokens of each trajectory, one row a group."""
    counts = [trajectory.num_sampled_tokens for trajectory in trajectories]
    return torch.tensor(counts).view(-1, num_generations)


def group_longest_responses(
    trajectories: Sequence[Trajectory], num_generations: int
) -> Int[Tensor, "groups generations"]:
    """Return the number of tokens of the longest response of each trajectory, one row a group."""
    counts = [trajectory.longest_response for trajectory in trajectories]
    return torch.tensor(counts).view(-1, num_generations)


def rollout_metrics(
    trajectories: Sequence[Trajectory], counted: Sequence[Trajectory] | None = None
) -> dict[str, float]:
    """Return the metrics of trajectories without regard to their groups; training and validation report the same.

    `accuracy`, `mean_gen_tokens_per_sample`, `max_gen_tokens_per_sample` (sampled tokens), `truncation_rate`,
    `mean_turns_per_sample`, `truncation_rate_by_turns` and `truncation_rate_by_time` where any has several turns (the
    rates also where they are above 0), `mean_sequences_per_sample` where any has several sequences,
    `env/num_overlong` where tokens of the environment did not fit,
    `env/num_retries` where attempts failed before, and the means of the environment's own are of all trajectories: one
    that could not be scored is not right. `reward`, `reward_std`, and of each named reward `rewards/NAME/mean` and
    `rewards/NAME/std`, are of those whose rewards count, and are left out where none does. The weighted sum of the
    named means is `reward`.

    Args:
        trajectories: All of them.
        counted: Those whose rewards count; None: all.
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
    """Return the mean and deviation of the reward, and of each named reward; empty of no trajectory."""
    if not counted:
        return {}
    rewards = np.array([trajectory.reward for trajectory in counted])
    metrics = {"reward": float(rewards.mean()), "reward_std": _sample_deviation(rewards)}
    if any(trajectory.turn_rewards for trajectory in counted):
        metrics[TURN_REWARDS_METRIC] = float(np.mean([math.fsum(trajectory.turn_rewards) for trajectory in counted]))
    of_environments = environments_in(counted)
    for name in dict.fromkeys(name for trajectory in counted for name in trajectory.rewards):
        # Environments may give different rewards: those that do not know one have no part in its mean.
        givers = [own for own in of_environments.values() if any(name in trajectory.rewards for trajectory in own)]
        named = np.array([trajectory.rewards.get(name, 0.0) for own in givers for trajectory in own])
        metrics[f"rewards/{name}/mean"] = float(named.mean())
        metrics[f"rewards/{name}/std"] = _sample_deviation(named)
    return metrics


def _sample_deviation(values: Float[np.ndarray, " values"]) -> float:
    """Sample standard deviation; 0 of one value."""
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
