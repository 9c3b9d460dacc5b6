# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tasks of the staleness study: where their prompts and the model that runs begin with come from."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from examples.studies.preparation import calculator_data, calculator_model, make_data, make_model


@dataclass(frozen=True)
class Task:
    """A task that models are trained on.

    Attributes:
        config: Settings of all its runs.
        make_data: Takes the study's folder, returns that of the data; made once.
        make_model: Takes both, returns the folder of a fine-tuned model; trained once.
    """

    config: Path
    make_data: Callable[[Path], Path]
    make_model: Callable[[Path, Path], Path]


_HERE = Path(__file__).parent
TASKS = {
    "addition": Task(_HERE / "addition.yaml", make_data, lambda output, data: make_model("small", output, data)),
    "calculator": Task(_HERE / "calculator.yaml", calculator_data, calculator_model),
}
