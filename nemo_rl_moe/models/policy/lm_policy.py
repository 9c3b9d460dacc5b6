# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver's side of the policy: shards each batch over the data-parallel ranks and calls the workers."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_moe.config.schema import MasterConfig
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.distributed.fillers import append_fillers
from nemo_rl_moe.distributed.microbatches import (
    Batching,
    DynamicBatching,
    PackedBatching,
    PlainBatching,
    plan_evaluation,
    plan_microbatches,
)
from nemo_rl_moe.distributed.rank_batch import make_shard
from nemo_rl_moe.distributed.token_batch import TokenBatch
from nemo_rl_moe.distributed.worker_group import WorkerGroup
from nemo_rl_moe.metrics import MetricSeries, concatenate
from nemo_rl_moe.models.policy.interfaces import EvaluationResult, LossFunction, TrainResult
from nemo_rl_moe.models.policy.megatron_policy_worker import MegatronPolicyWorker

if TYPE_CHECKING:
    from nemo_rl_moe.models.megatron.trainer import RankTrainResult


def choose_batching(policy: PolicyConfig) -> Batching:
    """How microbatches are cut, as the configuration says."""
    if policy.sequence_packing.enabled:
        return PackedBatching(max_tokens=policy.sequence_packing.train_mb_tokens)
    if policy.dynamic_batching.enabled:
        return DynamicBatching(max_tokens=policy.dynamic_batching.train_mb_tokens)
    return PlainBatching(micro_batch_size=policy.train_micro_batch_size)


class MegatronPolicy:
    """A policy trained by Megatron-Core workers, one Ray actor a rank.

    Args:
        config: The whole configuration.
        cluster: A started cluster with a place for every rank.
        seed: Seed of dropout.
        num_steps: Optimizer steps of the whole run.
    """

    def __init__(self, config: MasterConfig, cluster: RayCluster, *, seed: int, num_steps: int):
        self._policy = config.policy
        self._batching = choose_batching(config.policy)
        self._workers = WorkerGroup(
            cluster,
            MegatronPolicyWorker,
            {"policy": config.policy, "seed": seed, "num_steps": num_steps},
            start_timeout_s=config.cluster.worker_start_timeout_s,
        )
        descriptions = self._workers.call_all("describe")
        self._coordinates = [description["coordinates"] for description in descriptions]
        self._data_parallel_size: int = self._coordinates[0].data_parallel_size
        megatron = config.policy.megatron_cfg
        # An interleaved schedule runs microbatches in groups of as many as there are stages.
        interleaved = megatron.virtual_pipeline_model_parallel_size is not None
        self._microbatch_multiple = megatron.pipeline_model_parallel_size if interleaved else 1
        self.moe_configuration: dict[str, Any] = descriptions[0]["moe_configuration"]

    def train(self, batch: TokenBatch, loss_function: LossFunction) -> TrainResult:
        """One optimizer step for each global batch in `batch`."""
        size = self._policy.train_global_batch_size
        plan = plan_microbatches(
            batch.lengths.tolist(),
            num_data_parallel_ranks=self._data_parallel_size,
            global_batch_size=size,
            batching=self._batching,
            microbatch_multiple=self._microbatch_multiple,
        )
        global_batches = [batch.select(range(start, start + size)) for start in range(0, len(batch), size)]
        shards = [
            [
                make_shard(batch, by_rank[rank], whole)
                for by_rank, whole in zip(plan.global_batches, global_batches, strict=True)
            ]
            for rank in range(self._data_parallel_size)
        ]
        results: list[RankTrainResult] = self._call("train", shards, loss_function)
        first = results[0]
        return TrainResult(
            global_loss=first.global_loss,
            grad_norm=first.grad_norm,
            lr=first.lr,
            num_microbatches=first.num_microbatches,
            num_tokens=int(batch.lengths.sum()),
            microbatch_metrics=_join([result.microbatch_metrics for result in results]),
            moe_metrics=first.moe_metrics,
            expert_load=first.expert_load,
        )

    def evaluate(self, batch: TokenBatch, loss_function: LossFunction) -> EvaluationResult:
        """Forward passes only; the batch need not be divisible over the ranks."""
        plan = plan_evaluation(
            batch.lengths.tolist(),
            num_data_parallel_ranks=self._data_parallel_size,
            batching=self._batching,
            microbatch_multiple=self._microbatch_multiple,
        )
        filled = append_fillers(batch, plan.fillers)
        shards = [make_shard(filled, microbatches, batch) for microbatches in plan.by_rank]
        return EvaluationResult(microbatch_metrics=_join(self._call("evaluate", shards, loss_function)))

    def save_weights(self, directory: Path) -> None:
        """Writes the weights as a Hugging Face folder."""
        self._workers.call_all("save_weights", directory.absolute())

    def shutdown(self) -> None:
        """Stops every worker."""
        self._workers.shutdown()

    def _call(self, method: str, by_data_parallel_rank: Sequence[Any], loss_function: LossFunction) -> list[Any]:
        """Calls every worker with its share of the batch; pipeline and tensor ranks of one share all get that share."""
        shares = [by_data_parallel_rank[place.data_parallel_rank] for place in self._coordinates]
        return self._workers.call_each(method, [(share, loss_function) for share in shares])


def _join(by_rank: list[dict[str, MetricSeries]]) -> dict[str, MetricSeries]:
    reporting = [metrics for metrics in by_rank if metrics]
    return {name: concatenate(metrics[name] for metrics in reporting) for name in reporting[0]}
