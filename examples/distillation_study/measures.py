# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures of a run of the study of distillation, from its metrics."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from examples.distillation_study.grid import Run
from examples.studies.results import Measures, Result

VALIDATED_AFTER = (0, 5, 10, 20, 30)
LEVEL = 0.80
"""Accuracy up to which methods are timed. It was chosen before any run of the comparison."""
_PERIOD = 5
MEAN_ACCURACY = "mean accuracy over the run"
"""Criterion for the choice of a learning rate."""
STEPS_TO_LEVEL = f"steps to {LEVEL:.2f}"


def _after(step: int) -> Callable[[Sequence[float]], float]:
    return lambda values: values[min(step // _PERIOD, len(values) - 1)]


def _mean_of_trained(values: Sequence[float]) -> float:
    """Return the mean over the validations except the initial one."""
    return math.fsum(values[1:]) / len(values[1:])


def steps_to_level(values: Sequence[float]) -> float:
    """Return the number of steps until `LEVEL`, interpolated between validations. All steps if it is not reached."""
    for index, (before, after) in enumerate(pairwise(values)):
        if before < LEVEL <= after:
            return _PERIOD * (index + (LEVEL - before) / (after - before))
    return float(_PERIOD * (len(values) - 1))


MEASURES: Measures = {
    "accuracy": ("val/accuracy", lambda values: values[-1]),
    MEAN_ACCURACY: ("val/accuracy", _mean_of_trained),
    STEPS_TO_LEVEL: ("val/accuracy", steps_to_level),
    **{f"accuracy after {step} steps": ("val/accuracy", _after(step)) for step in VALIDATED_AFTER},
    "divergence, first step": ("train/teacher_kl", lambda values: values[0]),
    "divergence, last step": ("train/teacher_kl", lambda values: values[-1]),
    "routes that differ from the teacher's, first": (
        "train/moe/teacher_routes/rows_differing_from_teacher",
        lambda values: values[0],
    ),
    "routes that differ from the teacher's, last": (
        "train/moe/teacher_routes/rows_differing_from_teacher",
        lambda values: values[-1],
    ),
}
"""Name to the metric, and to the reduction of its values over the steps."""
COMPARED = (*(f"accuracy after {step} steps" for step in VALIDATED_AFTER), STEPS_TO_LEVEL)
"""Measures for the comparison with the baseline's run of the same seed."""

Results = dict[Run, Result]
