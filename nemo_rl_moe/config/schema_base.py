# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Base of the configuration's models: strict, frozen, no unknown keys, every number with its range."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


@dataclass(frozen=True)
class ExpectedWords:
    """Expected form of a text, for the error message where its type does not say it."""

    words: str


@dataclass(frozen=True)
class RenamedValue:
    """A former name of a field's value; the error for it gives the new one."""

    old: str
    new: str


@dataclass(frozen=True, eq=False)
class NameIn:
    """A text that has to be a name in a registry.

    Attributes:
        registry: Records by name, read when a value is checked.
    """

    registry: Mapping[str, object]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of the text, with a check against the names."""
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, name: str) -> str:
        if name not in self.registry:
            raise ValueError(f"not one of {', '.join(self.registry)}")
        return name


_VARIABLE = re.compile(r"\$[A-Za-z_{]")


def expanded(path: str) -> str:
    """Return a path with the home folder in place of its `~`.

    Raises:
        ValueError: There is no such home, or the path has a variable, which nobody fills in.
    """
    found = os.path.expanduser(path)  # noqa: PTH111  (a name on the hub is no path)
    if found.startswith("~") or _VARIABLE.search(found):
        raise ValueError("a variable, or a home that is not there")
    return found


PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
WholeOrLess = Annotated[float, Field(ge=0, le=1)]
UnitFloat = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
PATH = ExpectedWords("a path (~ is the home folder, ${oc.env:NAME} a variable)")
"""Mark of a path, in which variables of the environment are filled in."""
PathText = Annotated[str, Field(min_length=1), AfterValidator(expanded), PATH]
"""A file or folder, or a name on the hub."""

# Upper ends beyond which a value is a slip of the keyboard, far from what anybody trains with.
MOST_PROCESSES = 4096
LARGEST_SEED = 2**32 - 1
Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]
Processes = Annotated[int, Field(gt=0, le=MOST_PROCESSES)]
"""Processes or threads on one machine."""
Coefficient = Annotated[float, Field(ge=0, le=1000)]
"""Weight of a term of the loss; 0: none."""
PositiveCoefficient = Annotated[float, Field(gt=0, le=1000)]
Ratio = Annotated[float, Field(ge=0, le=1_000_000_000)]
"""A ratio of probabilities, which ends at e^20, or a size that is measured against one."""
PositiveRatio = Annotated[float, Field(gt=0, le=1_000_000_000)]
RewardSize = Annotated[float, Field(ge=0, le=1_000_000)]
Temperature = Annotated[float, Field(ge=0.01, le=100)]
"""A divisor of logits: below its range they leave the number format, above it all tokens are equally likely."""
Seconds = Annotated[float, Field(gt=0, le=100_000_000)]
"""A time limit, of three years at most: the operating system's timers take no more than some hundred."""


DurationText = Annotated[str, Field(min_length=1), ExpectedWords('"DD:HH:MM:SS" in quotes')]
CustomCode = Annotated[str, Field(pattern=":"), ExpectedWords("package.module:name")]
"""Name of a function or a class of the user's own."""

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


class SupervisedLoopConfig(StrictModel):
    """Length of a loop over samples, and times of validation."""

    max_num_epochs: PositiveInt
    """Passes over the training samples after which the run ends."""
    max_num_steps: PositiveInt | None
    """Optimizer steps after which the run ends, if that comes first; null: epochs alone decide."""
    val_period: NonNegativeInt
    """Validate each time this many steps are done; 0: never."""
    val_batches: PositiveInt | None
    """Global batches of one validation; null: all held-out samples."""
    val_at_start: bool
    """Validate before the first step."""
    val_at_end: bool
    """Validate after the last step."""
    seed: Seed
    """Seed of the order of the samples and of dropout."""
