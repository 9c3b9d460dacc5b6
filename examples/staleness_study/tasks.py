# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tasks of the staleness study: the sources of their prompts and of the initial model."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from examples.studies.preparation import calculator_data, calculator_model, make_data, make_model


@dataclass(frozen=True)
class Task:
    """A training task.

    Attributes:
        config: Settings of all its runs.
        make_data: Makes the data once. Takes the study's folder, and returns the folder of the data.
        make_model: Trains the initial model once. Takes both folders, and returns the model's.
    """

    config: Path
    make_data: Callable[[Path], Path]
    make_model: Callable[[Path, Path], Path]


_HERE = Path(__file__).parent
TASKS = {
    "addition": Task(_HERE / "addition.yaml", make_data, lambda output, data: make_model("small", output, data)),
    "calculator": Task(_HERE / "calculator.yaml", calculator_data, calculator_model),
}
