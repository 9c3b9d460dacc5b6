# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Several environments in one run: the sections `env` and `data` of GRPO, with those of each environment."""

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
"""Name of the environment of a run that has no mixture."""


class MixedEnvironmentConfig(EnvironmentConfig):
    """One environment of a mixture. Keys that it does not set are those of `env`."""

    weight: Weight
    """Its share of the prompts of each step is this over the sum of all weights."""


class MixtureConfig(EnvironmentConfig):
    """How trajectories are made and scored, in one environment or in several."""

    mixture: dict[EnvironmentName, MixedEnvironmentConfig]
    """Several environments by name, each with its `weight` and the keys of `env` that differ for it; those that it does
    not set are those of `env`, also below `driver` and `reward` where it keeps their `kind`. {}: `env` is the only
    one."""

    @property
    def environments(self) -> Mapping[str, EnvironmentConfig]:
        """Return the section of each environment by its name; the only one of a run has the name ''."""
        return self.mixture or {THE_ONLY_ONE: self}

    @property
    def shared_reward_weights(self) -> Mapping[str, float] | None:
        """Return the weights of named rewards that all environments share; None: none, or they differ."""
        first, *others = (each.reward_weights for each in self.environments.values())
        return first if all(other == first for other in others) else None


class PromptSetConfig(StrictModel):
    """The prompts of one environment."""

    train: PromptSourceConfig
    """The prompts to train on."""
    validation: PromptSourceConfig | None
    """The prompts that are held out; null: this environment is not validated."""
    prompt_key: Text
    """Key of a record that holds the prompt."""
    prompt_template: Text | None
    """Text of the user's last turn, with the prompt in place of `{prompt}`."""
    answer_key: Text
    """Key of a record that holds the right answer."""


class MixedPromptDataConfig(PromptDataConfig):
    """The prompts to train on and to validate with, of one environment or of several."""

    environment_key: Text
    """Key of a record that names its environment, where all environments of `env.mixture` share the data. Dots reach
    into objects."""
    environments: dict[EnvironmentName, PromptSetConfig]
    """Data of each environment of `env.mixture`, where each has its own: `train`, `validation`, `prompt_key`,
    `prompt_template` and `answer_key`; what it does not set is that of `data`. {}: they share `train` and `validation`,
    whose records name their environment."""

    def of(self, name: str) -> PromptDataConfig:
        """Return the section as it is for one environment."""
        own = self.environments.get(name)
        return (
            self if own is None else self.model_copy(update={key: getattr(own, key) for key in type(own).model_fields})
        )

    def sources(self) -> Iterator[tuple[str, PromptDataConfig]]:
        """Yield each section with prompts that are read, behind its key."""
        if not self.environments:
            yield "data", self
        for name in self.environments:
            yield f"data.environments.{name}", self.of(name)


def environment_key(name: str) -> str:
    """Return the key of the section of an environment."""
    return f"env.mixture.{name}" if name else "env"
