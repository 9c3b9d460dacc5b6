# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures of a run of the study of distillation, from the metrics that it has logged."""

from collections.abc import Callable, Sequence

from examples.distillation_study.grid import Run
from examples.studies.results import Measures, Result

VALIDATED_AFTER = (0, 5, 10, 20, 30)
_PERIOD = 5


def _after(step: int) -> Callable[[Sequence[float]], float]:
    return lambda values: values[min(step // _PERIOD, len(values) - 1)]


MEASURES: Measures = {
    "accuracy": ("val/accuracy", lambda values: values[-1]),
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
"""Name to the metric, and to what is taken of its values over the steps."""

Results = dict[Run, Result]
