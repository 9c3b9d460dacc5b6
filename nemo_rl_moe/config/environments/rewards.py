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
    """How responses are scored."""

    kind: str
    """Name of the kind of reward, such as `math`."""

    needs_answer: ClassVar[bool] = True
    """Whether a response is compared with the answer of its record."""
    reads_whole_records: ClassVar[bool] = False
    """Whether the scorer may read any key of a record."""
    may_name_rewards: ClassVar[bool] = False
    """Whether a response may get several named rewards."""

    @property
    def code(self) -> str | None:
        """Return `key: reference` of the user's code that scores, or None for a built-in kind."""
        return None


class RewardModelAloneConfig(RewardConfig):
    """The reward is only the score of the model in the section `reward_model`."""

    kind: Literal["reward_model"]
    """Name of this kind of reward."""
    needs_answer: ClassVar[bool] = False


class WorkerRewardConfig(RewardConfig):
    """Scoring by a function of one response, in worker processes."""

    num_workers: Processes
    """Number of processes that score."""
    timeout_s: Seconds
    """Time limit of one response, in seconds. Scoring fails if it is exceeded."""
    answer_after: Text | None
    """Text before the answer in a response, such as `</think>`. Only the text after its last occurrence is scored, or
    the full response if it does not occur. null: the full response."""


class MathConfig(WorkerRewardConfig):
    """Scoring by math-verify, which compares the response with the record's answer."""

    kind: Literal["math"]
    """Name of this kind of reward."""


class ExactConfig(WorkerRewardConfig):
    """Equality with the text of the record's answer."""

    kind: Literal["exact"]
    """Name of this kind of reward."""


class ReasoningGymConfig(WorkerRewardConfig):
    """The verifier of a task of reasoning-gym. The task can also generate the prompts."""

    kind: Literal["reasoning_gym"]
    """Name of this kind of reward."""
    task: Text
    """Name of the task, such as basic_arithmetic."""
    parameters: dict[str, Any]
    """Parameters of the task. Missing parameters have the task's defaults. {}: all have defaults."""
    partial_credit: bool
    """true: the reward is the verifier's score. false: the reward is 1 if the score is 1, and 0 otherwise."""


class CallableConfig(WorkerRewardConfig):
    """A Python function of the user."""

    kind: Literal["callable"]
    """Name of this kind of reward."""
    function: Text
    """`package.module:function`. The function takes a `ScoringItem` and returns a reward, or a pair of a reward and a
    bool (whether the response is correct). With `env.reward_weights` it returns a dict: name -> reward."""

    needs_answer: ClassVar[bool] = False
    reads_whole_records: ClassVar[bool] = True
    may_name_rewards: ClassVar[bool] = True

    @property
    def code(self) -> str | None:
        return f"env.reward.function: {self.function}"


class CustomRewardConfig(WorkerRewardConfig):
    """An object of the user with a method `score`. Each worker makes it once."""

    kind: Literal["custom"]
    """Name of this kind of reward."""
    factory: CustomCode
    """`package.module:name` of a class or function that makes the object."""
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
    """Name of this kind of reward."""
    url: Text
    """Address of the endpoint, such as `http://judge:8000/v1`."""
    model: Text
    """Name of the judge's model."""
    template: Text
    """Text of the request to the judge. The fields `{prompt}`, `{response}` and `{answer}` (of the record) are filled
    in."""
    full_marks: Annotated[float, Field(gt=0, le=1_000_000)]
    """Mark of a perfect response. The reward is the mark divided by this."""
    max_tokens: PositiveInt
    """Maximum number of tokens in the judge's reply."""
    request_timeout_s: Seconds
    """A request fails if no byte arrives for this many seconds."""
    attempts: PositiveInt
    """Maximum number of requests for one response. A request is repeated if the endpoint is busy, breaks off, or
    replies without a mark."""
    api_key_env: Text | None
    """Name of the environment variable that holds the API key. The key is only sent in the request's header. null: no
    key."""
    cache_folder: PathText | None
    """Folder for the judge's replies. A request that was answered before is read from there. null: no cache."""

    needs_answer: ClassVar[bool] = False
    reads_whole_records: ClassVar[bool] = True
