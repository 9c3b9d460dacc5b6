# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The kinds of rewards: what scores a response."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from nemo_rl_moe.config.schema_base import (
    CustomCode,
    PathText,
    PositiveInt,
    Processes,
    Seconds,
    StrictModel,
    Text,
)


class RewardConfig(StrictModel):
    """Scoring of responses."""

    kind: str
    """Name of the kind."""

    needs_answer: ClassVar[bool] = True
    """A response is compared with the answer of its record."""
    reads_whole_records: ClassVar[bool] = False
    """Whatever scores may read any key of a record."""
    may_name_rewards: ClassVar[bool] = False
    """A response may get several rewards by name."""

    @property
    def code(self) -> str | None:
        """Return key and value of the user's code that scores; None: a built-in kind scores."""
        return None


class RewardModelAloneConfig(RewardConfig):
    """The model of the section `reward_model` alone."""

    kind: Literal["reward_model"]
    """This kind."""
    needs_answer: ClassVar[bool] = False


class WorkerRewardConfig(RewardConfig):
    """Scoring by a function of one response, in worker processes."""

    num_workers: Processes
    """Processes that score."""
    timeout_s: Seconds
    """Time limit of one response, in seconds. Scoring fails if it is exceeded."""
    answer_after: Text | None
    """Text before the answer in a response, such as `</think>`. The text after its last occurrence is scored, or the
    full response if it does not occur. null: the full response."""


class MathConfig(WorkerRewardConfig):
    """math-verify against the record's answer."""

    kind: Literal["math"]
    """This kind."""


class ExactConfig(WorkerRewardConfig):
    """The same text as the record's answer."""

    kind: Literal["exact"]
    """This kind."""


class ReasoningGymConfig(WorkerRewardConfig):
    """The verifier of a task of reasoning-gym. The task can also generate the prompts."""

    kind: Literal["reasoning_gym"]
    """This kind."""
    task: Text
    """Its name, such as basic_arithmetic."""
    parameters: dict[str, Any]
    """Parameters of the task. Missing ones have the task's defaults."""
    partial_credit: bool
    """true: the reward is the verifier's score. false: the reward is 1 for a score of 1, and 0 otherwise."""


class CallableConfig(WorkerRewardConfig):
    """A Python function of the user's own."""

    kind: Literal["callable"]
    """This kind."""
    function: Text
    """`package.module:function`. It takes a `ScoringItem` and returns a reward, or a pair of a reward and a bool for a
    right response. With `env.reward_weights` it returns a dict of rewards."""

    needs_answer: ClassVar[bool] = False
    reads_whole_records: ClassVar[bool] = True
    may_name_rewards: ClassVar[bool] = True

    @property
    def code(self) -> str | None:
        """Return the function."""
        return f"env.reward.function: {self.function}"


class CustomRewardConfig(WorkerRewardConfig):
    """An object of the user's own with a method `score`, made once in each worker."""

    kind: Literal["custom"]
    """This kind."""
    factory: CustomCode
    """`package.module:name`, a class or a function that makes the object."""
    parameters: dict[str, Any]
    """Named arguments of it; {}: none."""

    needs_answer: ClassVar[bool] = False
    reads_whole_records: ClassVar[bool] = True
    may_name_rewards: ClassVar[bool] = True

    @property
    def code(self) -> str | None:
        """Return the class or function."""
        return f"env.reward.factory: {self.factory}"


class JudgeConfig(WorkerRewardConfig):
    """A model that marks each response, asked through an OpenAI-compatible endpoint."""

    kind: Literal["judge"]
    """This kind."""
    url: Text
    """Address of the endpoint, such as `http://judge:8000/v1`."""
    model: Text
    """Name of the judge's model."""
    template: Text
    """The request, with `{prompt}`, `{response}` and `{answer}` (of the record) in it."""
    full_marks: Annotated[float, Field(gt=0, le=1_000_000)]
    """Mark of a perfect response. The reward is the mark divided by this."""
    max_tokens: PositiveInt
    """Most tokens of a reply."""
    request_timeout_s: Seconds
    """Seconds without a received byte after which one attempt ends."""
    attempts: PositiveInt
    """Most requests for one response, if the endpoint is busy, breaks off, or replies without a mark."""
    api_key_env: Text | None
    """Environment variable with the key, which is sent in the request's header only. null: no key."""
    cache_folder: PathText | None
    """Folder that caches replies by a digest of the request. null: no cache."""

    needs_answer: ClassVar[bool] = False
    reads_whole_records: ClassVar[bool] = True
