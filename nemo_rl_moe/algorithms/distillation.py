# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Distillation: teachers score the policy's responses, and the loss brings the policy closer to them.

It is a step of GRPO. Its batch also has the teachers' log-probabilities, and its loss includes the divergence from the
teachers (GKD, arXiv:2306.13649; MiniLLM, arXiv:2306.08543).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import torch
from jaxtyping import Shaped
from torch import Tensor

from nemo_rl_moe.algorithms.losses.distillation import (
    TEACHER_LOGPROBS,
    DistillationLoss,
    shares_of_means,
)
from nemo_rl_moe.algorithms.losses.policy_gradient import PolicyGradientLoss
from nemo_rl_moe.config.schema_distillation import DistillationMasterConfig
from nemo_rl_moe.distributed.batch import TokenBatch, per_token
from nemo_rl_moe.errors import ConfigurationError, counted
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.models.candidates import CANDIDATE_IDS, candidate_column
from nemo_rl_moe.models.interfaces import LossFunction
from nemo_rl_moe.rollouts.trajectory import Trajectory, rows_of
from nemo_rl_moe.routing.indexer_replay import INDEXER_POSITIONS
from nemo_rl_moe.routing.replay import ROUTED_EXPERTS

if TYPE_CHECKING:
    from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy
    from nemo_rl_moe.models.policy.model_workers import ModelWorkers

Found = TypeVar("Found")


@dataclass(frozen=True)
class Teachers:
    """Teachers of a run.

    Attributes:
        vocabulary_size: Number of tokens in the policy's vocabulary.
        by_sample: Sample id -> name of the sample's teacher. Empty if the records do not name teachers.
    """

    config: DistillationMasterConfig
    models: Mapping[str, "ModelWorkers"]
    vocabulary_size: int
    by_sample: Mapping[str, str] = field(default_factory=dict)

    def loss(self, policy_gradient: PolicyGradientLoss) -> LossFunction:
        """Return the loss of a step. If the policy samples the responses, the loss includes `policy_gradient`."""
        settings = self.config.distillation
        is_given = settings.responses == "given"
        return DistillationLoss(
            kl_type=settings.kl_type,
            mixed_kl_weight=settings.mixed_kl_weight,
            has_candidates=settings.topk_logits_k is not None,
            kl_weight=settings.kl_weight,
            policy_gradient_weight=settings.policy_gradient_weight,
            cross_entropy_weight=settings.cross_entropy_weight,
            policy_gradient=None if is_given else policy_gradient,
        )

    def teacher_of(self, trajectory: Trajectory) -> str | None:
        """Return the name of the teacher of a trajectory, if it has one."""
        settings = self.config.distillation
        if settings.teacher_key is not None:
            return self.by_sample.get(trajectory.sample_id)
        by_environment = settings.teacher_by_environment
        return by_environment.get(trajectory.environment) if by_environment else next(iter(self.models))

    def with_scores(
        self, policy: "MegatronPolicy", batch: TokenBatch, trajectories: Sequence[Trajectory], clock: PhaseClock
    ) -> tuple[TokenBatch, dict[str, float]]:
        """Return the batch with the scores of each trajectory's teacher.

        Args:
            policy: Policy, which chooses the candidates if `distillation.topk_ids` is not `teacher`.
            batch: Batch of the trajectories.
            trajectories: Trained trajectories.
            clock: Clock on which the phases `candidates` and `teachers` are timed.

        Returns:
            The batch with the columns of `DistillationLoss`, and the metrics `distillation/share_with_teacher` (share
            of the trained tokens), `distillation/bytes_to_teachers` and `distillation/bytes_from_teachers` (ids and
            log-probabilities that are sent between driver and teachers).
        """
        rows = self.rows_of(trajectories)
        counts = torch.zeros_like(batch.token_mask)
        for chosen in rows.values():
            counts[chosen] = batch.token_mask[chosen]
        size = self.config.policy.train_global_batch_size
        shares = shares_of_means(counts, batch.first_rows_of_samples()[::size])
        scored, num_to, num_from = self._scored(policy, batch, rows, clock)
        self._check_numbers(scored, rows)
        metrics = {
            "distillation/share_with_teacher": float(counts[:, 1:].sum() / max(batch.num_valid_tokens(), 1)),
            "distillation/bytes_to_teachers": float(num_to),
            "distillation/bytes_from_teachers": float(num_from),
        }
        scored = scored.with_columns(**shares)
        settings = self.config.distillation
        if not settings.policy_gradient_weight and not settings.cross_entropy_weight:
            # Tokens without a teacher do not train. An update with only such tokens would still move the weights, by
            # Adam's momentum.
            scored = replace(scored, token_mask=counts)
        return scored, metrics

    def _check_numbers(self, scored: TokenBatch, rows: Mapping[str, Sequence[int]]) -> None:
        """Raise an error if all responses of one teacher have a non-finite score.

        With fewer such responses, no error is raised, because only the update is lost.
        """
        is_wrong = ~scored.columns[TEACHER_LOGPROBS].values.isfinite()
        is_wrong = is_wrong.flatten(2).any(-1) if is_wrong.ndim > 2 else is_wrong
        for name, chosen in rows.items():
            of_rows = (is_wrong[list(chosen)] & scored.token_mask[list(chosen)]).any(-1)
            if of_rows.all():
                raise ConfigurationError(
                    f"distillation.teachers.{name}: {self.config.distillation.teachers[name].model_name} returned"
                    f" log-probabilities that are NaN or infinite in all of the step's"
                    f" {counted(len(chosen), 'response')}, expected numbers: check the teacher's weights, and"
                    f" policy.precision {self.config.policy.precision}"
                )

    def rows_of(self, trajectories: Sequence[Trajectory]) -> dict[str, list[int]]:
        """Return teacher's name -> rows of the batch that this teacher scores, for teachers that score any."""
        rows: dict[str, list[int]] = {}
        for trajectory, own in zip(trajectories, rows_of(trajectories), strict=True):
            teacher = self.teacher_of(trajectory)
            if teacher is not None:
                rows.setdefault(teacher, []).extend(own)
        return rows

    def _scored(
        self, policy: "MegatronPolicy", batch: TokenBatch, rows: Mapping[str, Sequence[int]], clock: PhaseClock
    ) -> tuple[TokenBatch, int, int]:
        """Return the batch with the teachers' log-probabilities, and the numbers of bytes to and from the teachers."""
        settings = self.config.distillation
        k = settings.topk_logits_k
        asked = batch.without_stored(ROUTED_EXPERTS, INDEXER_POSITIONS)  # the teachers choose for themselves
        if k is None:
            with clock.phase("teachers"):
                found = self._of_teachers(asked, rows, lambda model, part: model.start_logprobs(part))
            logprobs = _in_batch(batch, rows, found)
            return batch.with_columns(**{TEACHER_LOGPROBS: per_token(logprobs)}), 0, _num_bytes(found)
        if settings.topk_ids == "teacher":
            with clock.phase("teachers"):
                likeliest = self._of_teachers(
                    asked, rows, lambda model, part: model.start_top_candidates(part, k, self.vocabulary_size)
                )
            ids, found = [each.ids for each in likeliest], [each.logprobs for each in likeliest]
            columns = {CANDIDATE_IDS: candidate_column(_in_batch(batch, rows, ids, k))}
            num_to, num_from = 0, _num_bytes([*ids, *found])
        else:
            policy.prepare_for_logprobs(clock)
            # Under replay, the policy is trained with the replayed experts. So they also choose the candidates.
            replays = self.config.policy.megatron_cfg.routing_replay == "rollout"
            with clock.phase("candidates"):
                own = policy.start_top_candidates(batch if replays else asked, k, self.vocabulary_size)()
            columns = {CANDIDATE_IDS: candidate_column(own.ids)}
            with clock.phase("teachers"):
                found = self._of_teachers(
                    asked.with_columns(**columns), rows, lambda model, part: model.start_candidate_logprobs(part)
                )
            num_to, num_from = sum(own.ids[list(chosen)].nbytes for chosen in rows.values()), _num_bytes(found)
        columns[TEACHER_LOGPROBS] = per_token(_in_batch(batch, rows, found, k))
        return batch.with_columns(**columns), num_to, num_from

    def _of_teachers(
        self,
        batch: TokenBatch,
        rows: Mapping[str, Sequence[int]],
        start: Callable[["ModelWorkers", TokenBatch], Callable[[], Found]],
    ) -> list[Found]:
        started = [start(self.models[name], batch.select(chosen)) for name, chosen in rows.items()]
        return [wait() for wait in started]


def _in_batch(
    batch: TokenBatch,
    rows: Mapping[str, Sequence[int]],
    found: Sequence[Shaped[Tensor, "rows tokens ..."]],
    *of_token: int,
) -> Shaped[Tensor, "batch sequence ..."]:
    """Return the teachers' values in one tensor `[batch, sequence, *of_token]`, with 0 in rows without a teacher."""
    dtype = found[0].dtype if found else torch.float32  # a step may have no response with a teacher
    values = torch.zeros((*batch.input_ids.shape, *of_token), dtype=dtype)
    for chosen, of_rows in zip(rows.values(), found, strict=True):
        values[list(chosen), : of_rows.shape[1]] = of_rows
    return values


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
