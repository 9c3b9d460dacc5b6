# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver that is a taskset of `verifiers.v1`: an agents' program whose episodes use the run's endpoint."""

from functools import partial

from nemo_rl_moe.config.environments.verifiers_v1 import VerifiersV1Config
from nemo_rl_moe.launch.drivers.agent import prepare_program
from nemo_rl_moe.launch.drivers.setup import DriverKind
from nemo_rl_moe.rollouts.libraries.verifiers_v1 import TasksetProgram, check_taskset, taskset_prompts


def verifiers_v1(driver: VerifiersV1Config) -> DriverKind:
    """Return the functions with which a run checks and starts a taskset."""
    return DriverKind(
        prepare=lambda setup: prepare_program(driver, setup, TasksetProgram(driver, setup.env.score_truncated)),
        check=partial(check_taskset, driver),
        prompts=partial(taskset_prompts, driver),
    )
