# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights and progress of a generation engine in commands that do not train."""

from typing import TYPE_CHECKING

from nemo_rl_moe.algorithms.grpo import update_engine
from nemo_rl_moe.algorithms.run_observers import checked_refits
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.generation.interface import GenerationEngine
from nemo_rl_moe.generation.lockstep import LockstepEngine
from nemo_rl_moe.launch.refit import make_refit_check
from nemo_rl_moe.launch.setup import ModelRun, PreparedModel
from nemo_rl_moe.metrics import PhaseClock

if TYPE_CHECKING:
    from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy

_ROWS_AT_A_TIME = 64
_ROUNDS_OF_A_CHUNK = 4


def give_weights(
    config: GRPOMasterConfig, run: ModelRun, policy: "MegatronPolicy", engine: GenerationEngine, model: PreparedModel
) -> None:
    """Send the workers' weights to an engine that keeps a copy, and check that they have arrived.

    Raises:
        WeightSyncError: The weights have not arrived.
    """
    if engine.shares_weights:
        return
    check = make_refit_check(config, policy, engine, model.hf_config, run.console)
    with run.console.phase("sending the weights to the engine"):
        update_engine(engine, policy, PhaseClock(), checked_refits(check, engine))


def answer_in_chunks(config: GRPOMasterConfig, engine: GenerationEngine) -> int | None:
    """Limit the number of requests that the trainer's engine answers at the same time, so that progress can be shown.

    Returns:
        The number of requests in a chunk, or None for an engine that reports each response as it finishes.
    """
    if not isinstance(engine, LockstepEngine):
        return None
    rows = config.policy.generation.max_batch_size or _ROWS_AT_A_TIME
    engine.most_at_a_time = _ROUNDS_OF_A_CHUNK * rows * config.data_parallel_size
    return engine.most_at_a_time
