# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver that is a taskset of `verifiers.v1`. An agent of that library plays its tasks."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from nemo_rl_moe.config.environments.agent import EndpointDriverConfig
from nemo_rl_moe.config.schema_base import PositiveInt, Text
from nemo_rl_moe.config.schema_grpo import PromptDataConfig
from nemo_rl_moe.config.suggestions import shortened

_OF_THE_RUN = {
    "taskset": {"id": "{key}.id"},
    "validation": {"id": "{key}.id", "task": "{key}.taskset.task"},
    "agent": {
        "max_turns": "{key}.max_turns",
        "model": "policy.model_name",
        "client": "the run's endpoint",
        "sampling": "policy.generation",
    },
}
"""Section -> keys of the library that the run sets -> the source of their values."""


class VerifiersV1Config(EndpointDriverConfig):
    """A taskset of the verifiers library from 0.4 on (`verifiers.v1`), with its prompts, tools and rewards."""

    kind: Literal["verifiers_v1"]
    """Name of this kind of driver."""
    id: Text
    """Name of the taskset, such as gsm8k-v1."""
    taskset: dict[str, Any]
    """Settings of the taskset, `env.taskset` of the library. {}: its defaults."""
    validation: dict[str, Any] | PositiveInt | None = Field(union_mode="left_to_right")
    """Tasks to validate with. A mapping has the settings that differ from `taskset`, such as `{split: test}`. A number
    holds out that many tasks at the end of the taskset. null: no validation, and `data.validation` must be null too."""
    agent: dict[str, Any]
    """Settings of the agent that plays, `env.agent` of the library, such as `harness` and `runtime`. Without a harness,
    the taskset's harness is used, or else the library's chat program (`null`)."""

    scoring = "by_driver"
    has_own_prompts: ClassVar[bool] = True

    @property
    def named(self) -> str | None:
        return f"verifiers {self.id}"

    def problems(self, key: str, data_key: str, data: PromptDataConfig) -> Iterator[str]:
        """Yield the driver's common error lines, one for each setting that only the run may set, and one if there are
        no tasks to validate with."""
        yield from super().problems(key, data_key, data)
        for section, elsewhere in _OF_THE_RUN.items():
            given = getattr(self, section)
            if isinstance(given, dict):
                for name in sorted(elsewhere.keys() & given):
                    where = elsewhere[name].format(key=key)
                    yield f"{key}.{section}.{name}: got {shortened(str(given[name]))}, expected none: {where} sets it"
        if data.validation is not None and not self.validation:
            given = "null" if self.validation is None else "{}"
            yield (
                f"{key}.validation: got {given}, expected the settings of held-out tasks, such as {{split: test}}, or"
                f" their number; or set {data_key}.validation: null"
            )
