# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Configurations of the runs of the study of adapters."""

from collections.abc import Sequence
from pathlib import Path

from examples.lora_study.grid import METHODS, Run
from examples.lora_study.measures import MEASURES
from examples.studies.session import Study, settings_of_run
from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.config.schema import GRPOMasterConfig


def study_of(output: Path, data: Path, model_name: str, overrides: Sequence[str]) -> Study[Run]:
    """Return the study of a folder.

    Args:
        data: Folder of the demo's sums.
        model_name: Folder of the initial model.
        overrides: Settings of all runs, with the highest priority.
    """

    def config(run: Run) -> GRPOMasterConfig:
        common = settings_of_run(output, run.name, model_name, data)
        return load_grpo_config(METHODS[run.method].config, [*common, *run.overrides(), *overrides])

    return Study(output, config, MEASURES)
