# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Several environments in one run: their sections in `env` and `data` of a GRPO configuration."""

from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import Field

from nemo_rl_moe.config.schema_base import ExpectedWords, StrictModel, Text
from nemo_rl_moe.config.schema_environment import EnvironmentConfig
from nemo_rl_moe.config.schema_grpo import PromptDataConfig, PromptSourceConfig

EnvironmentName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_-]*$", max_length=60),
    ExpectedWords("letters, digits, underscores and hyphens, at most 60"),
]
Weight = Annotated[float, Field(gt=0, le=1_000_000)]
THE_ONLY_ONE = ""
"""Name of the environment of a run without a mixture."""


class MixedEnvironmentConfig(EnvironmentConfig):
    """One environment of a mixture. A missing key has the value of the same key in `env`."""

    weight: Weight
    """The environment's share of the prompts of each step is this weight over the sum of all weights."""


class MixtureConfig(EnvironmentConfig):
    """How trajectories are made and scored, in one environment or in several."""

    mixture: dict[EnvironmentName, MixedEnvironmentConfig]
    """Name -> environment, with its `weight` and the keys that differ from `env`. A missing key has the value of the
    same key in `env`. Within `driver` and `reward` this holds only if the `kind` is the same. {}: `env` is the only
    environment."""

    @property
    def environments(self) -> Mapping[str, EnvironmentConfig]:
        """Return the section of each environment by name. Without a mixture, the only name is ''."""
        return self.mixture or {THE_ONLY_ONE: self}

    @property
    def shared_reward_weights(self) -> Mapping[str, float] | None:
        """Return the weights of named rewards if they are the same in all environments, else None."""
        first, *others = (each.reward_weights for each in self.environments.values())
        return first if all(other == first for other in others) else None


class PromptSetConfig(StrictModel):
    """The prompts of one environment."""

    train: PromptSourceConfig
    """The prompts to train on."""
    validation: PromptSourceConfig | None
    """The held-out prompts. null: this environment is not validated."""
    prompt_key: Text
    """Key of a record that holds the prompt."""
    prompt_template: Text | None
    """Text of the user's last turn, in which `{prompt}` is replaced by the prompt. null: the prompt alone."""
    answer_key: Text
    """Key of a record that holds the correct answer."""


class MixedPromptDataConfig(PromptDataConfig):
    """The prompts to train on and to validate with, of one environment or of several."""

    environment_key: Text
    """Key of a record that holds the name of its environment, if environments share the data. Dots reach into
    objects."""
    environments: dict[EnvironmentName, PromptSetConfig]
    """Environment of `env.mixture` -> its data: `train`, `validation`, `prompt_key`, `prompt_template` and
    `answer_key`. A missing key has the value of the same key in `data`. {}: all environments share `train` and
    `validation`, and each record names its environment."""

    def of(self, name: str) -> PromptDataConfig:
        """Return this section with the values of the environment `name`."""
        own = self.environments.get(name)
        if own is None:
            return self
        return self.model_copy(update={key: getattr(own, key) for key in type(own).model_fields})

    def sources(self) -> Iterator[tuple[str, PromptDataConfig]]:
        """Yield the key and the section of each set of prompts."""
        if not self.environments:
            yield "data", self
        for name in self.environments:
            yield f"data.environments.{name}", self.of(name)


def environment_key(name: str) -> str:
    """Return the key of an environment's section."""
    return f"env.mixture.{name}" if name else "env"
