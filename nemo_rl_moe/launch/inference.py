# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A started generation engine made ready to answer without training: its weights, and how its progress is told."""

from collections.abc import Callable

from nemo_rl_moe.algorithms.grpo import update_engine
from nemo_rl_moe.algorithms.run_observers import checked_refits
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.generation.interface import GenerationEngine
from nemo_rl_moe.generation.portions import EngineInPortions
from nemo_rl_moe.launch.model_run import ModelRun
from nemo_rl_moe.launch.refit import make_refit_check
from nemo_rl_moe.launch.setup import PreparedModel
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy

_ROWS_AT_A_TIME = 64
_ROUNDS_OF_A_PORTION = 4


def give_weights(
    config: GRPOMasterConfig, run: ModelRun, policy: MegatronPolicy, engine: GenerationEngine, model: PreparedModel
) -> None:
    """Gives an engine with a copy of the weights those of the workers, and checks that they have arrived.

    Raises:
        WeightSyncError: They have not.
    """
    if engine.shares_weights:
        return
    check = make_refit_check(config, policy, engine, model.hf_config, run.console)
    with run.console.phase("sending the weights to the engine"):
        update_engine(engine, policy, PhaseClock(), checked_refits(check, engine))


def in_portions(config: GRPOMasterConfig, engine: GenerationEngine, told: Callable[[int], object]) -> EngineInPortions:
    """The engine, asked for so much at a time that its progress can be told.

    Args:
        config: The whole configuration.
        engine: A started engine with weights.
        told: Gets the number of responses so far.
    """
    rows = config.policy.generation.max_batch_size or _ROWS_AT_A_TIME
    # An engine of its own tells of each response as it finishes.
    portion = _ROUNDS_OF_A_PORTION * rows * config.data_parallel_size if engine.shares_weights else None
    return EngineInPortions(engine, portion, told)
