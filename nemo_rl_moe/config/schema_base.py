# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What all configuration models share: strict, frozen, no unknown keys, every number with its range."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


@dataclass(frozen=True)
class ExpectedWords:
    """Says in an error message what a text has to look like, where the type does not say it.

    Attributes:
        words: What follows `expected`.
    """

    words: str


PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
UnitFloat = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
DurationText = Annotated[str, Field(min_length=1), ExpectedWords('"DD:HH:MM:SS" in quotes')]

SETTINGS = ConfigDict(
    extra="forbid",
    frozen=True,
    strict=True,
    allow_inf_nan=False,
    use_attribute_docstrings=True,
    protected_namespaces=(),
)


class StrictModel(BaseModel):
    """One section of the configuration. It has no defaults: values come from YAML alone."""

    model_config = SETTINGS
