# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Agreement of the routes of policy and teachers, for MoE models with routers of the same shape."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from nemo_rl_moe.algorithms.routing_measurements import sampled_sequences
from nemo_rl_moe.algorithms.run_observers import RunObserver
from nemo_rl_moe.config.schema_grpo import RoutingMeasurementsConfig
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.metrics import PhaseClock, with_prefix
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.routing.metrics.metric_keys import with_moe_prefix
from nemo_rl_moe.routing.replay import ROUTED_EXPERTS

if TYPE_CHECKING:
    from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy
    from nemo_rl_moe.models.policy.model_workers import ModelWorkers


class TeacherRoutes(RunObserver):
    """Measurement of how often a teacher's routers choose other experts than the policy's, on a sample of sequences.

    If the policy approaches its teacher in its routes too, agreement rises from step to step. Experts have no inherent
    order: models that were trained from different weights agree only by chance.

    Args:
        config: Steps to measure, and the share of a step.
        teachers: Teachers with routers of the policy's shape, by name.
        rows_of: Returns the rows of the batch that each teacher scores.
        seed: Chooses the sequences to measure, together with the step.
    """

    def __init__(
        self,
        config: RoutingMeasurementsConfig,
        policy: "MegatronPolicy",
        teachers: Mapping[str, "ModelWorkers"],
        rows_of: Callable[[Sequence[Trajectory]], Mapping[str, Sequence[int]]],
        seed: int,
    ):
        self._config, self._policy, self._teachers, self._rows_of, self._seed = config, policy, teachers, rows_of, seed

    def before_update(
        self, step: int, batch: TokenBatch, trajectories: Sequence[Trajectory], clock: PhaseClock
    ) -> dict[str, float]:
        """Compare the routes of the policy before a step's updates, if the step is due.

        Returns:
            `moe/teacher_routes/{rows,tokens}_differing_from_{name}`: shares of rows, a layer's experts of a token, and
            of tokens, by the name of the teacher.
        """
        every = self._config.every_n_steps
        if every is None or step % every != 0:
            return {}
        metrics: dict[str, float] = {}
        bare = batch.without_stored(ROUTED_EXPERTS)
        with clock.phase("teacher_routes"):
            for name, rows in self._rows_of(trajectories).items():
                of_teacher = bare.select(rows)
                chosen = sampled_sequences(of_teacher, self._config.share_of_tokens, (self._seed, step))
                if name not in self._teachers or not chosen:
                    continue
                sample = of_teacher.select(chosen)
                _, own = self._policy.logprobs_and_routes(sample)
                if own is not None:
                    compared = self._teachers[name].compare_routes(sample.with_stored(ROUTED_EXPERTS, own))
                    metrics |= compared.differences(f"from_{name}")
        return with_moe_prefix(with_prefix("teacher_routes", metrics))
