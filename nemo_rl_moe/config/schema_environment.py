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
"""Treatment of a response that the environment failed to score, as `env.on_failure` names it."""


class EnvironmentConfig(StrictModel):
    """How trajectories are made and scored."""

    driver: Driver
    """How the model's responses and the messages between them follow each other."""
    reward: Reward | None
    """Scoring of responses; null: the driver scores its trajectories itself."""
    reward_weights: dict[RewardName, RewardWeight] | None
    """Weights of several rewards by their names, of which the weighted sum is trained on and each is logged; 0: logged
    alone. Every response has to get each of them. null: a response gets one number."""
    on_failure: OnFailure
    """Treatment of a response that the environment failed to score: it raised, took too long, returned no number or
    lost its worker. leave_out: neither trained on nor compared with others, and a group with fewer than two other
    responses is left out with it; lowest: it gets the lowest reward of its group's scored responses, and no positive
    advantage; zero: reward 0, which is better than a negative one; retry: its prompt is answered once more, in a fresh
    session, and left out if that fails too."""
    score_truncated: bool
    """Score responses that were truncated at the length limit; false: they get reward 0."""
    rollout_timeout_s: Seconds | None
    """Seconds that the code and the tools of one trajectory of a function, tools or an agent may take; then it has
    failed, and is counted. Time in which it waits for the model's responses or for `session.score()` does not count,
    nor that of other trajectories. null: no limit."""
    rewritten_turns: Literal["begin_anew", "keep"]
    """Sets how `session.append_message` continues where the chat template now renders earlier turns in another way,
    such as without their thinking. begin_anew: a new training sequence begins with a fresh rendering, as the model is
    used later; keep: the sequence goes on with all tokens that are there."""

    @property
    def may_name_rewards(self) -> bool:
        """Return whether code of the user's scores, which may give several rewards by name."""
        return self.reward is not None and self.reward.may_name_rewards

    @property
    def needs_answers(self) -> bool:
        """Return whether a response is compared with the answer of its record."""
        return self.reward is not None and self.reward.needs_answer

    @property
    def reads_whole_records(self) -> bool:
        """Return whether code or a library drives or scores, which may read any key of a record."""
        scores = self.reward is not None and self.reward.reads_whole_records
        return scores or self.driver.named is not None
