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
        """Return the code of the user's that scores, by its key and value; None: none does."""
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
    """Seconds that one response may take; then scoring it has failed."""
    answer_after: Text | None
    """Score what follows the last such text, and all of a response without it; null: all of every response."""


class MathConfig(WorkerRewardConfig):
    """math-verify against the record's answer."""

    kind: Literal["math"]
    """This kind."""


class ExactConfig(WorkerRewardConfig):
    """The same text as the record's answer."""

    kind: Literal["exact"]
    """This kind."""


class ReasoningGymConfig(WorkerRewardConfig):
    """The verifier of a task of reasoning-gym, of which prompts can be drawn too."""

    kind: Literal["reasoning_gym"]
    """This kind."""
    task: Text
    """Its name, such as basic_arithmetic."""
    parameters: dict[str, Any]
    """The task's own parameters; what is left out is the task's default."""
    partial_credit: bool
    """true: the verifier's score is the reward; false: 1 for a score of 1, otherwise 0."""


class CallableConfig(WorkerRewardConfig):
    """A Python function of the user's own."""

    kind: Literal["callable"]
    """This kind."""
    function: Text
    """`package.module:function`; takes a `ScoringItem`, returns a reward, or a reward and whether it is right; with
    `env.reward_weights`, a dict of rewards in its place."""

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
    """A judge: a model behind an OpenAI-compatible endpoint marks each response."""

    kind: Literal["judge"]
    """This kind."""
    url: Text
    """Address of the endpoint, such as `http://judge:8000/v1`."""
    model: Text
    """Name of the judge's model."""
    template: Text
    """The request, with `{prompt}`, `{response}` and `{answer}` (of the record) in it."""
    full_marks: Annotated[float, Field(gt=0, le=1_000_000)]
    """Mark of a perfect response; marks are from 0 to it, and the reward is their share of it."""
    max_tokens: PositiveInt
    """Most tokens of a reply."""
    request_timeout_s: Seconds
    """Seconds without a byte after which one attempt is given up."""
    attempts: PositiveInt
    """Requests for one response, where the endpoint is busy, breaks off, or its reply has no mark."""
    api_key_env: Text | None
    """Name of the environment variable that holds the key, which goes into the request's header and nowhere else; null:
    the endpoint wants none."""
    cache_folder: PathText | None
    """Folder of replies that have come, by a digest of the request; null: every response is judged."""

    needs_answer: ClassVar[bool] = False
    reads_whole_records: ClassVar[bool] = True
