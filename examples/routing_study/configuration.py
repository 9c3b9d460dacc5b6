# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Configurations of the routing study's runs."""

from collections.abc import Sequence
from pathlib import Path

from examples.routing_study.grid import Run
from examples.routing_study.measures import MEASURES
from examples.studies.session import Study, settings_of_run
from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.config.schema import GRPOMasterConfig

STUDY_CONFIG = Path(__file__).with_name("study.yaml")


def study_of(output: Path, model_name: str, data: Path, overrides: Sequence[str]) -> Study[Run]:
    """Return the study of a folder.

    Args:
        model_name: Folder of the initial model.
        data: Folder of the demo's sums.
        overrides: Settings of all runs, with the highest priority.
    """

    def config(run: Run) -> GRPOMasterConfig:
        common = settings_of_run(output, run.name, model_name, data)
        # Batches of one are valid for any number of responses, which the user may override.
        ones = ["policy.train_global_batch_size=1", "policy.train_micro_batch_size=1"]
        base = load_grpo_config(STUDY_CONFIG, [*common, *overrides, *ones])
        responses = base.grpo.num_prompts_per_step * base.grpo.num_generations_per_prompt
        own = run.overrides(responses, base.policy.logprob_batch_size)
        return load_grpo_config(STUDY_CONFIG, [*common, *own, *overrides])

    return Study(output, config, MEASURES)
