# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Agreement between the routes of the policy and of its teachers, for MoE models with routers of the same shape."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from nemo_rl_moe.algorithms.routing_measurements import sampled_sequences
from nemo_rl_moe.algorithms.run_observers import RunObserver
from nemo_rl_moe.config.schema_grpo import RoutingMeasurementsConfig
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.metrics import PhaseClock, with_prefix
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.routing.indexer_replay import INDEXER_POSITIONS
from nemo_rl_moe.routing.metrics.metric_keys import with_moe_prefix
from nemo_rl_moe.routing.replay import ROUTED_EXPERTS

if TYPE_CHECKING:
    from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy
    from nemo_rl_moe.models.policy.model_workers import ModelWorkers


class TeacherRoutes(RunObserver):
    """Observer that measures how often a teacher's routers choose other experts than the policy's.

    It compares a sample of sequences. The share falls from step to step if the policy learns not only the teacher's
    probabilities but also its routes. Experts have no inherent order, so models that were trained from different
    weights agree only by chance.

    Args:
        config: Settings: which steps are measured, and which share of a step's tokens.
        teachers: Name -> teacher, for teachers with routers of the policy's shape.
        rows_of: Function that returns name of a teacher -> rows of the batch that it scores.
        seed: Seed that, together with the step, chooses the sequences to measure.
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
            `moe/teacher_routes/{rows,tokens}_differing_from_{name}`: the share of rows (experts of a token in a layer)
            and the share of tokens that differ from the teacher with this name.
        """
        every = self._config.every_n_steps
        if every is None or step % every != 0:
            return {}
        metrics: dict[str, float] = {}
        bare = batch.without_stored(ROUTED_EXPERTS, INDEXER_POSITIONS)
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
