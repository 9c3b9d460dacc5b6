# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The kinds of rewards, which score responses."""

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
    """The scorer may read any key of a record."""
    may_name_rewards: ClassVar[bool] = False
    """A response may get several rewards by name."""

    @property
    def code(self) -> str | None:
        """Return key and value of the user's code that scores, or None for a built-in kind."""
        return None


class RewardModelAloneConfig(RewardConfig):
    """Only the model of the section `reward_model`."""

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
    """Text before the answer in a response, such as `</think>`. Only the text after its last occurrence is scored, or
    the full response if it does not occur. null: the full response."""


class MathConfig(WorkerRewardConfig):
    """Comparison with the record's answer by math-verify."""

    kind: Literal["math"]
    """This kind."""


class ExactConfig(WorkerRewardConfig):
    """Equality with the text of the record's answer."""

    kind: Literal["exact"]
    """This kind."""


class ReasoningGymConfig(WorkerRewardConfig):
    """The verifier of a task of reasoning-gym. The task can also generate the prompts."""

    kind: Literal["reasoning_gym"]
    """This kind."""
    task: Text
    """Name of the task, such as basic_arithmetic."""
    parameters: dict[str, Any]
    """Parameters of the task. Missing ones have the task's defaults. {}: none."""
    partial_credit: bool
    """true: the reward is the verifier's score. false: the reward is 1 for a score of 1, and 0 otherwise."""


class CallableConfig(WorkerRewardConfig):
    """A Python function of the user."""

    kind: Literal["callable"]
    """This kind."""
    function: Text
    """`package.module:function`. It takes a `ScoringItem` and returns a reward, or a pair of a reward and a bool for a
    correct response. With `env.reward_weights` it returns a dict of rewards."""

    needs_answer: ClassVar[bool] = False
    reads_whole_records: ClassVar[bool] = True
    may_name_rewards: ClassVar[bool] = True

    @property
    def code(self) -> str | None:
        return f"env.reward.function: {self.function}"


class CustomRewardConfig(WorkerRewardConfig):
    """The user's object with a method `score`, made once in each worker."""

    kind: Literal["custom"]
    """This kind."""
    factory: CustomCode
    """`package.module:name`, a class or a function that makes the object."""
    parameters: dict[str, Any]
    """Keyword arguments of the factory. {}: none."""

    needs_answer: ClassVar[bool] = False
    reads_whole_records: ClassVar[bool] = True
    may_name_rewards: ClassVar[bool] = True

    @property
    def code(self) -> str | None:
        return f"env.reward.factory: {self.factory}"


class JudgeConfig(WorkerRewardConfig):
    """A model that marks each response through an OpenAI-compatible endpoint."""

    kind: Literal["judge"]
    """This kind."""
    url: Text
    """Address of the endpoint, such as `http://judge:8000/v1`."""
    model: Text
    """Name of the judge's model."""
    template: Text
    """The request, with the fields `{prompt}`, `{response}` and `{answer}` (of the record)."""
    full_marks: Annotated[float, Field(gt=0, le=1_000_000)]
    """Mark of a perfect response. The reward is the mark divided by this."""
    max_tokens: PositiveInt
    """Most tokens of a reply."""
    request_timeout_s: Seconds
    """One attempt ends after this many seconds without a received byte."""
    attempts: PositiveInt
    """Most requests for one response, if the endpoint is busy, breaks off, or replies without a mark."""
    api_key_env: Text | None
    """Environment variable that holds the key. The key is only sent in the request's header. null: no key."""
    cache_folder: PathText | None
    """Folder that caches replies by a digest of the request. null: no cache."""

    needs_answer: ClassVar[bool] = False
    reads_whole_records: ClassVar[bool] = True
