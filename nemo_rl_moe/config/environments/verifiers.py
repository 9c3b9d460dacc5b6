# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver that is an environment of the verifiers library."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from nemo_rl_moe.config.environments.base import DriverConfig
from nemo_rl_moe.config.schema_base import Text
from nemo_rl_moe.config.schema_grpo import PromptDataConfig


class VerifiersConfig(DriverConfig):
    """An environment of the verifiers library, with its own prompts, tools and rubric."""

    kind: Literal["verifiers"]
    """This kind."""
    id: Text
    """Name of the environment, such as gsm8k."""
    arguments: dict[str, Any]
    """Arguments of its `load_environment`; {}: none."""

    scoring = "by_driver"
    has_own_prompts: ClassVar[bool] = True
    has_own_tools: ClassVar[bool] = True

    @property
    def named(self) -> str | None:
        """Return the library and the environment."""
        return f"verifiers {self.id}"

    def problems(self, key: str, data_key: str, data: PromptDataConfig) -> Iterator[str]:
        """Yield a line for each setting of data that the environment has itself."""
        yield from super().problems(key, data_key, data)
        with_it = f"with {key}.kind verifiers"
        if data.prompt_template is not None:
            yield f"{data_key}.prompt_template: got a text, expected null {with_it}, whose environment makes prompts"
        for name, source in (("train", data.train), ("validation", data.validation)):
            if source is not None and source.path is not None:
                yield (
                    f"{data_key}.{name}.path: got {source.path}, expected null {with_it}, whose environment has its own"
                    " data"
                )
