# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Configurations and schedules of the staleness study's runs."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import NamedTemporaryFile

from examples.staleness_study.grid import Run
from examples.staleness_study.measures import MEASURES
from examples.studies.session import Study, settings_of_run
from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.data.loader import epoch_order
from nemo_rl_moe.data.sources import count_lines
from nemo_rl_moe.rollouts.dispatch.schedule import ScheduledGroup, ScheduledStep


def study_of(output: Path, base: Path, model_name: str, data: Path, overrides: Sequence[str]) -> Study[Run]:
    """Return the study of a folder.

    Args:
        base: Settings of all runs of the task.
        model_name: Folder of the initial model.
        data: Folder of the task's prompts.
        overrides: Settings of all runs, with the highest priority.
    """
    prompts = data / "grpo.jsonl"

    def config(run: Run) -> GRPOMasterConfig:
        schedule = output / "schedules" / f"lag{run.lag}-s{run.seed:02d}.jsonl"
        common = settings_of_run(output, run.name, model_name, data)
        found = load_grpo_config(base, [*common, *run.overrides(str(schedule)), *overrides])
        write_schedule(schedule, scheduled_steps(prompts, found, run.lag))
        return found

    return Study(output, config, MEASURES)


def scheduled_steps(prompts: Path, config: GRPOMasterConfig, lag: int) -> list[ScheduledStep]:
    """Return the steps of one epoch in the order of a synchronous run, with groups sampled `lag` steps earlier.

    Args:
        prompts: JSONL file with a prompt per line.
    """
    size, updates = config.grpo.num_prompts_per_step, config.updates_per_step
    count = count_lines(prompts)
    order = epoch_order(count, config.grpo.seed, 0, shuffle=config.data.shuffle)
    steps = []
    for step in range(min(count // size, config.grpo.max_num_steps or count)):
        sampled = max(0, step - lag) * updates
        positions = range(step * size, (step + 1) * size)
        groups = [ScheduledGroup(at, f"{prompts}:{order[at] + 1}", 0, sampled, sampled) for at in positions]
        steps.append(ScheduledStep(step * updates, tuple(groups)))
    return steps


def write_schedule(path: Path, steps: Sequence[ScheduledStep]) -> None:
    """Write a schedule to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", dir=path.parent, suffix=".incomplete", delete=False) as file:
        file.writelines(json.dumps(asdict(step)) + "\n" for step in steps)  # several jobs write the same one
    Path(file.name).replace(path)
