# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Configurations of the runs of the study of distillation."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from examples.distillation_study.grid import METHODS, Run
from examples.distillation_study.measures import MEASURES
from examples.studies.session import Study, settings_of_run
from nemo_rl_moe.config.loading import load_any_config
from nemo_rl_moe.config.schema import GRPOMasterConfig


def study_of(
    output: Path, data: Path, model_name: str, teachers: Mapping[str, Path], overrides: Sequence[str]
) -> Study[Run]:
    """Return the study of a folder.

    Args:
        data: Folder of the demo's sums.
        model_name: Folder of the initial model.
        teachers: Folder of each kind of teacher.
        overrides: Settings of all runs, with the highest priority.
    """

    def config(run: Run) -> GRPOMasterConfig:
        method = METHODS[run.method]
        settings = [*settings_of_run(output, run.name, model_name, data), *run.overrides()]
        if method.teacher is not None:
            settings.append(f"distillation.teachers.teacher.model_name={teachers[method.teacher]}")
        found = load_any_config(method.config, [*settings, *overrides])
        assert isinstance(found, GRPOMasterConfig)
        return found

    return Study(output, config, MEASURES)
