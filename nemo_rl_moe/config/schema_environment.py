# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The section `env` of GRPO: the driver of trajectories, and the reward that scores responses."""

from typing import Annotated, Literal

from pydantic import Field

from nemo_rl_moe.config.environments.kinds import Driver, Reward
from nemo_rl_moe.config.schema_base import ExpectedWords, Seconds, StrictModel

RewardWeight = Annotated[float, Field(ge=-1_000_000, le=1_000_000)]
RewardName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=100),
    ExpectedWords("letters, digits, underscores, hyphens and dots, at most 100"),
]

OnFailure = Literal["leave_out", "lowest", "zero", "retry"]
"""Values of `env.on_failure`."""


class EnvironmentConfig(StrictModel):
    """How trajectories are made and scored."""

    driver: Driver
    """The code that makes a trajectory: it decides how the model's responses and the messages between them follow each
    other."""
    reward: Reward | None
    """How responses are scored. null: the driver scores its trajectories."""
    reward_weights: dict[RewardName, RewardWeight] | None
    """Name of a reward -> its weight, if a response gets several rewards. Training uses the weighted sum, and each
    reward is logged. A reward with weight 0 is only logged. Every response must get all named rewards. null: a response
    gets one number."""
    on_failure: OnFailure
    """Treatment of a response whose scoring failed because the environment raised, took too long, returned no number or
    lost its worker. leave_out: the response is neither trained on nor compared with others, and a group with fewer than
    two other responses is dropped too. lowest: the response gets the lowest reward of its group's scored responses, and
    no positive advantage. zero: the response gets reward 0, which is better than a negative reward. retry: the prompt
    is answered once more in a fresh session. If that fails too, the response is treated as with leave_out."""
    score_truncated: bool
    """true: score responses that were truncated at the length limit. false: truncated responses get reward 0."""
    rollout_timeout_s: Seconds | None
    """Time limit in seconds for the code and tools of one trajectory, if the driver is a function, tools or an agent. A
    trajectory that exceeds the limit has failed. Waiting for the model, `session.score()` or other trajectories does
    not count. null: no limit."""
    rewritten_turns: Literal["begin_anew", "keep"]
    """How `session.append_message` continues if the chat template renders earlier turns differently now, for example
    without their thinking. begin_anew: start a new training sequence from a fresh rendering, as the model will be used.
    keep: continue the sequence with all its tokens."""

    @property
    def may_name_rewards(self) -> bool:
        """Return whether the user's code scores responses, and so may return several named rewards."""
        return self.reward is not None and self.reward.may_name_rewards

    @property
    def needs_answers(self) -> bool:
        return self.reward is not None and self.reward.needs_answer

    @property
    def reads_whole_records(self) -> bool:
        """Return whether the user's code or a library drives or scores trajectories. Such code may read any key of a
        record."""
        scores = self.reward is not None and self.reward.reads_whole_records
        return scores or self.driver.named is not None
