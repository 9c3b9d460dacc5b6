# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Base of the drivers of trajectories. Each kind has a file in this folder."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from nemo_rl_moe.config.schema_base import StrictModel
from nemo_rl_moe.config.schema_grpo import PromptDataConfig


class DriverConfig(StrictModel):
    """Driver of trajectories. It decides how the model's responses and the messages between them follow each other."""

    kind: str
    """Name of the kind of driver, such as `tools`."""

    scoring: ClassVar[Literal["by_reward", "by_either", "by_driver"]] = "by_reward"
    """Source of a trajectory's reward: `env.reward`, the driver, or whichever of the two the user's code chooses."""
    has_own_prompts: ClassVar[bool] = False
    """Whether the prompts are the environment's own data."""
    has_own_tools: ClassVar[bool] = False
    """Whether the driver defines the tools that the chat template shows. If so, `data.tools` must be empty."""

    @property
    def named(self) -> str | None:
        """Return the name of the code, program or library that drives trajectories, or None if the run itself drives
        them."""
        return None

    def problems(self, key: str, data_key: str, data: PromptDataConfig) -> Iterator[str]:
        """Yield an error line for each setting that this driver excludes. `key` is the key of this section, and
        `data_key` the key of the section with its prompts."""
        if self.has_own_tools and data.tools:
            yield (
                f"data.tools: got {len(data.tools)}, expected [] with {key}.kind {self.kind}, which has tools of its"
                " own"
            )
        if not self.has_own_prompts:
            return
        with_it = f"with {key}.kind {self.kind}"
        if data.prompt_template is not None:
            yield f"{data_key}.prompt_template: got a text, expected null {with_it}, whose environment makes prompts"
        for name, source in (("train", data.train), ("validation", data.validation)):
            if source is not None and source.path is not None:
                yield (
                    f"{data_key}.{name}.path: got {source.path}, expected null {with_it}, whose environment has its own"
                    " data"
                )
