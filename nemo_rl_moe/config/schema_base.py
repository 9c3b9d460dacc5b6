# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Base of the configuration's models: strict, frozen, no unknown keys, each number with its range."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


@dataclass(frozen=True)
class ExpectedWords:
    """Description of a text's allowed values for error messages, if the text's type does not imply these values."""

    words: str


@dataclass(frozen=True)
class RenamedValue:
    """A former name of a field's value, so that the error can give the new name."""

    old: str
    new: str


@dataclass(frozen=True, eq=False)
class NameIn:
    """A text that must be a name in a registry. The registry is read each time a value is checked."""

    registry: Mapping[str, object]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, name: str) -> str:
        if name not in self.registry:
            raise ValueError(f"not one of {', '.join(self.registry)}")
        return name


_VARIABLE = re.compile(r"\$[A-Za-z_{]")


def expanded(path: str) -> str:
    """Return a path with its `~` replaced by the home folder. Raises ValueError if the path has a variable or an
    unknown home."""
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
"""Mark of a field that holds a path: `${oc.env:NAME}` is expanded in such a field only."""
PathText = Annotated[str, Field(min_length=1), AfterValidator(expanded), PATH]
"""A file, a folder, or a name on the hub."""

# A value above these bounds is a typing error.
MOST_PROCESSES = 4096
LARGEST_SEED = 2**32 - 1
Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]
Processes = Annotated[int, Field(gt=0, le=MOST_PROCESSES)]
"""Number of processes or threads on one machine."""
Coefficient = Annotated[float, Field(ge=0, le=1000)]
"""Weight of a term of the loss. 0: no such term."""
PositiveCoefficient = Annotated[float, Field(gt=0, le=1000)]
Ratio = Annotated[float, Field(ge=0, le=1_000_000_000)]
"""A ratio of probabilities, or a bound of such a ratio. A ratio is at most e^20."""
PositiveRatio = Annotated[float, Field(gt=0, le=1_000_000_000)]
RewardSize = Annotated[float, Field(ge=0, le=1_000_000)]
Temperature = Annotated[float, Field(ge=0.01, le=100)]
"""A divisor of logits. With a smaller divisor the logits overflow, and with a larger one all tokens are equally
likely."""
Seconds = Annotated[float, Field(gt=0, le=100_000_000)]
"""A time limit of at most three years. The operating system's timers end at some hundred years."""


DurationText = Annotated[str, Field(min_length=1), ExpectedWords('"DD:HH:MM:SS" in quotes')]
CustomCode = Annotated[str, Field(pattern=":"), ExpectedWords("package.module:name")]
"""Reference to a function or class of the user's code, `package.module:name`."""

SETTINGS = ConfigDict(
    extra="forbid",
    frozen=True,
    strict=True,
    allow_inf_nan=False,
    use_attribute_docstrings=True,
    protected_namespaces=(),
)


class StrictModel(BaseModel):
    """One section of the configuration. Its fields have no defaults: all values come from YAML."""

    model_config = SETTINGS


class SupervisedLoopConfig(StrictModel):
    """Length of a loop over samples, and when it validates."""

    max_num_epochs: PositiveInt
    """The run ends after this many passes over the training samples."""
    max_num_steps: PositiveInt | None
    """The run ends after this many optimizer steps, unless `max_num_epochs` ends it earlier. null: only
    `max_num_epochs` counts."""
    val_period: NonNegativeInt
    """Validate after every this many steps. 0: never."""
    val_batches: PositiveInt | None
    """Number of global batches in one validation. null: all held-out samples."""
    val_at_start: bool
    """Validate before the first step."""
    val_at_end: bool
    """Validate after the last step."""
    seed: Seed
    """Seed of the order of the samples and of dropout."""
