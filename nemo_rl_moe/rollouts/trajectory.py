# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Trajectories: token sequences with a mask of what is trained on, and the batch that a policy is trained with."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nemo_rl_moe.distributed.batch import (
    Column,
    ModelInput,
    TokenBatch,
    per_sequence,
    per_token,
    stored_per_token,
)
from nemo_rl_moe.distributed.stored_rows import StoredRows
from nemo_rl_moe.models.images import ModelImage, images_in
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.routing.replay import ROUTED_EXPERTS, UNKNOWN
from nemo_rl_moe.token_lag import NO_LAG

FinishReason = Literal["stop", "length"]
"""stop: the model or the environment ended it; length: it was truncated at a limit on its tokens."""
NOT_SAMPLED = -1
"""Weight version of a token that no model sampled."""

OVERLONG_METRIC = "env/num_overlong"
RETRIES_METRIC = "env/num_retries"


@dataclass(frozen=True)
class Trajectory:
    """One token sequence that a policy and an environment have made together, over any number of turns.

    There is no split into prompt and completion: the mask says which tokens are trained on.

    Attributes:
        sample_id: Where its prompt came from.
        group_id: Trajectories of one group are compared with each other; the others of its group have the same.
        token_ids: The whole sequence.
        loss_mask: True on tokens that are trained on, as targets.
        logprobs: Log-probability of each sampled token by the engine that sampled it, in nats; 0 on all other tokens.
        weight_versions: Optimizer steps of the weights that sampled each token; `NOT_SAMPLED` on all other tokens.
        reward: What it is worth; finite.
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
        routed_experts: Experts of each token in each MoE layer, `[moe_layers, topk]` int16 a token, as the pass chose
            them that first saw it; None where no engine reports them.
        model_inputs: Further inputs of the model, such as images.
        metrics: Further numbers of the environment, logged as means over trajectories.
    """

    sample_id: str
    group_id: str
    token_ids: Int[np.ndarray, " tokens"]
    loss_mask: Bool[np.ndarray, " tokens"]
    logprobs: Float[np.ndarray, " tokens"]
    weight_versions: Int[np.ndarray, " tokens"]
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
    routed_experts: StoredRows | None = None
    model_inputs: Mapping[str, ModelInput] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_truncated(self) -> bool:
        """True when it was truncated at a limit on its tokens."""
        return self.finish_reason == "length"

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens that the model sampled, end tokens included."""
        return int((self.weight_versions != NOT_SAMPLED).sum())

    @property
    def weight_version(self) -> int:
        """Optimizer steps of the newest weights that sampled a token; `NOT_SAMPLED` where none did."""
        return int(self.weight_versions.max(initial=NOT_SAMPLED))

    @property
    def images(self) -> list[ModelImage]:
        """Images that the model was shown; none for text."""
        return images_in(self.model_inputs)


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


def group_correctness(trajectories: Sequence[Trajectory], num_generations: int) -> Bool[Tensor, "groups generations"]:
    """Return the correctness of each trajectory, one row a group."""
    return torch.tensor([trajectory.is_correct for trajectory in trajectories]).view(-1, num_generations)


def group_sampled_tokens(trajectories: Sequence[Trajectory], num_generations: int) -> Int[Tensor, "groups generations"]:
    """Return the number of sampled tokens of each trajectory, one row a group."""
    counts = [trajectory.num_sampled_tokens for trajectory in trajectories]
    return torch.tensor(counts).view(-1, num_generations)


def sampled_tokens(trajectories: Sequence[Trajectory]) -> Bool[Tensor, "trajectories tokens"]:
    """Return which tokens are trained on, truncated trajectories included; False behind a trajectory's end."""
    mask = torch.zeros(len(trajectories), max(len(found.token_ids) for found in trajectories), dtype=torch.bool)
    for row, trajectory in enumerate(trajectories):
        mask[row, : len(trajectory.loss_mask)] = torch.as_tensor(trajectory.loss_mask)
    return mask


def token_lags(trajectories: Sequence[Trajectory], weight_version: int) -> Int[Tensor, "trajectories tokens"]:
    """Return the lag of each sampled token behind the weights that are trained; `NO_LAG` on all other tokens.

    Args:
        weight_version: Optimizer steps of the weights that are trained.
    """
    longest = max(len(found.token_ids) for found in trajectories)
    lags = torch.full((len(trajectories), longest), NO_LAG, dtype=torch.int32)
    for row, trajectory in enumerate(trajectories):
        versions = trajectory.weight_versions
        of_tokens = np.where(versions == NOT_SAMPLED, NO_LAG, weight_version - versions)
        lags[row, : len(versions)] = torch.as_tensor(of_tokens)
    return lags


def training_batch(
    trajectories: Sequence[Trajectory],
    advantages: Float[Tensor, "groups generations ..."] | Sequence[Float[Tensor, " tokens"]],
    pad_token_id: int,
    *,
    leave_out_truncated: bool,
    takes_part: Bool[Tensor, "groups generations"] | None = None,
) -> TokenBatch:
    """Return the batch of trajectories for the policy-gradient loss.

    Args:
        trajectories: In the order of the advantages.
        advantages: One for each trajectory, or for each of its tokens.
        pad_token_id: What stands after a sequence's end.
        leave_out_truncated: Train on no token of a trajectory that was truncated at a limit (DAPO's overlong
            filtering).
        takes_part: Trajectories that are trained on; of the others no token is. They stay in the batch, so that sizes
            of global batches and microbatches do not depend on what the environment could score. None: all.

    Returns:
        A batch with the columns `advantages`, `generation_logprobs`, the model's inputs, and, stored, `routed_experts`
        where an engine reports them.
    """
    lengths = [len(trajectory.token_ids) for trajectory in trajectories]
    longest = max(lengths)
    shape = (len(trajectories), longest)
    input_ids = torch.full(shape, pad_token_id, dtype=torch.long)
    token_mask = torch.zeros(shape, dtype=torch.bool)
    logprobs = torch.zeros(shape)
    trained = [True] * len(trajectories) if takes_part is None else takes_part.reshape(-1).tolist()
    for row, (trajectory, length) in enumerate(zip(trajectories, lengths, strict=True)):
        input_ids[row, :length] = torch.as_tensor(trajectory.token_ids)
        if trained[row] and not (leave_out_truncated and trajectory.is_truncated):
            token_mask[row, :length] = torch.as_tensor(trajectory.loss_mask)
        logprobs[row, :length] = torch.as_tensor(trajectory.logprobs)
    columns = {"advantages": advantage_column(advantages, shape), "generation_logprobs": per_token(logprobs)}
    capture = stored_per_token([trajectory.routed_experts for trajectory in trajectories], fill=UNKNOWN)
    return TokenBatch(
        input_ids=input_ids,
        lengths=torch.tensor(lengths),
        token_mask=token_mask,
        sample_ids=tuple(trajectory.sample_id for trajectory in trajectories),
        columns=columns,
        stored={} if capture is None else {ROUTED_EXPERTS: capture},
    ).with_inputs([trajectory.model_inputs for trajectory in trajectories])


def advantage_column(
    advantages: Float[Tensor, "groups generations ..."] | Sequence[Float[Tensor, " tokens"]], shape: tuple[int, int]
) -> Column:
    """Return advantages as a column of a batch.

    Args:
        advantages: One for each trajectory, `[groups, generations]`; or one for each token, with a third dimension as
            long as the longest trajectory or as a tensor for each trajectory.
        shape: Trajectories, and tokens of the longest one.
    """
    if isinstance(advantages, Tensor):
        flat = advantages.flatten(0, 1).float()
        return per_sequence(flat) if flat.ndim == 1 else per_token(flat)
    values = torch.zeros(shape)
    for row, of_tokens in enumerate(advantages):
        values[row, : len(of_tokens)] = of_tokens
    return per_token(values)


def rollout_metrics(
    trajectories: Sequence[Trajectory], counted: Sequence[Trajectory] | None = None
) -> dict[str, float]:
    """Return the metrics of trajectories without regard to their groups; training and validation report the same.

    `accuracy`, `mean_gen_tokens_per_sample`, `max_gen_tokens_per_sample` (sampled tokens), `truncation_rate`,
    `mean_turns_per_sample` where any has several turns, `env/num_overlong` where tokens of the environment did not fit,
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
    if num_overlong := sum(bool(trajectory.overlong) for trajectory in trajectories):
        metrics[OVERLONG_METRIC] = float(num_overlong)
    if num_retries := sum(trajectory.num_retries for trajectory in trajectories):
        metrics[RETRIES_METRIC] = float(num_retries)
    for name in dict.fromkeys(name for trajectory in trajectories for name in trajectory.metrics):
        found = [trajectory.metrics[name] for trajectory in trajectories if name in trajectory.metrics]
        metrics[name] = float(np.mean(found))
    return metrics


def _reward_metrics(counted: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean and deviation of the reward, and of each named reward; empty of no trajectory."""
    if not counted:
        return {}
    rewards = np.array([trajectory.reward for trajectory in counted])
    metrics = {"reward": float(rewards.mean()), "reward_std": _sample_deviation(rewards)}
    for name in dict.fromkeys(name for trajectory in counted for name in trajectory.rewards):
        named = np.array([trajectory.rewards.get(name, 0.0) for trajectory in counted])
        metrics[f"rewards/{name}/mean"] = float(named.mean())
        metrics[f"rewards/{name}/std"] = _sample_deviation(named)
    return metrics


def _sample_deviation(values: Float[np.ndarray, " values"]) -> float:
    """Sample standard deviation; 0 of one value."""
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
