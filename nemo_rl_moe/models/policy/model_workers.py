# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver's side of a model. It splits batches among the data-parallel ranks and calls the workers."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar, TypeVarTuple, cast

import ray
import torch
from torch import Tensor

from nemo_rl_moe.config.schema_grpo import generating
from nemo_rl_moe.config.schema_policy import MegatronConfig, PolicyConfig, sequence_multiple
from nemo_rl_moe.config.schema_run import POLICY_ROLE
from nemo_rl_moe.distributed.batch import TokenBatch, append_fillers, make_shards, shared_with_previous
from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.distributed.microbatches import (
    Batching,
    DynamicBatching,
    EvaluationPlan,
    PackedBatching,
    PlainBatching,
    plan_evaluation,
)
from nemo_rl_moe.distributed.shared_arrays import ArrayStore
from nemo_rl_moe.distributed.worker_group import WorkerGroup
from nemo_rl_moe.metrics import MetricSeries, concatenate
from nemo_rl_moe.models.candidates import Candidates
from nemo_rl_moe.models.families import num_patches_of
from nemo_rl_moe.models.hf_files import ModelSource, load_config_json, load_hf_config, plain_config
from nemo_rl_moe.models.images import image_patches
from nemo_rl_moe.models.interfaces import Head, LossFunction, RouteComparison, missing_heads
from nemo_rl_moe.models.megatron.training.measurements import (
    Measurement,
    candidate_logprobs,
    prefix_values,
    sequence_scores,
    token_score_norms,
    top_candidates,
)
from nemo_rl_moe.models.megatron.training.megatron_model import MegatronModel
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from nemo_rl_moe.models.policy.start_rank import start_rank

LEAST_SAVED = 1 / 3
"""Share of a batch's tokens that shared prefixes must save with `policy.shared_prefix: auto`."""
Share = TypeVar("Share")
Further = TypeVarTuple("Further")
Result = TypeVar("Result")


def choose_batching(policy: PolicyConfig, micro_batch_size: int) -> Batching:
    """Return the configured batching by tokens. If there is none, microbatches have `micro_batch_size` sequences."""
    if policy.sequence_packing.enabled:
        multiple = sequence_multiple(policy.megatron_cfg.context_parallel_size)
        packing = policy.sequence_packing
        return PackedBatching(packing.train_mb_tokens, multiple, packing.train_mb_patches)
    if policy.dynamic_batching.enabled:
        dynamic = policy.dynamic_batching
        return DynamicBatching(dynamic.train_mb_tokens, dynamic.microbatch_overhead_tokens, dynamic.train_mb_patches)
    return PlainBatching(micro_batch_size)


class ModelWorkers:
    """Megatron-Core workers of one model of a run (the policy or another role), one Ray actor per rank.

    Args:
        role: Role of the model for error messages, such as `policy` or `teacher`.
        policy: Section of the configuration that describes the model and its layout.
        num_steps: Number of optimizer steps of the run. With None, the model only runs forward passes, and has no
            gradients and no optimizer state.
        keep_reference: Whether to keep the initial weights as the reference model.

    Attributes:
        moe_configuration: The router and expert settings in force.
        moe_configuration_sources: Name of a setting -> its source.
        notices: Notices for the user on the loaded weights, one line for each.
    """

    def __init__(
        self,
        role: str,
        policy: PolicyConfig,
        cluster: RayCluster,
        *,
        source: ModelSource,
        seed: int = 0,
        num_steps: int | None = None,
        keep_reference: bool = False,
        heads: Collection[Head] = (Head.LOGPROBS,),
    ):
        self._role, self._policy, self._heads = role, policy, frozenset(heads)
        self._batching = choose_batching(policy, policy.train_micro_batch_size)
        generates = generating(policy)
        self._logprob_batching = choose_batching(policy, generates.logprob_batch_size) if generates else self._batching
        self._max_generation_batch_size = generates.generation.max_batch_size if generates else None
        self._hf_config = load_hf_config(str(source.folder()))
        self._num_patches = num_patches_of(self._hf_config)
        make_rank = partial(
            start_rank,
            policy=policy,
            source=source,
            hf_config=plain_config(self._hf_config),
            seed=seed,
            num_steps=num_steps,
            keep_reference=keep_reference,
            decodes_text=generates is not None and bool(generates.generation.stop_strings),
            heads=self._heads,
        )
        started = WorkerGroup(
            cluster,
            make_rank,
            start_timeout_s=cluster.config.worker_start_timeout_s,
            call_timeout_s=cluster.config.worker_call_timeout_s,
            environment=_environment(policy, on_gpus=cluster.config.gpus_per_node > 0),
            model=None if role == POLICY_ROLE else role,
        )
        # Without optimizer steps the workers are of class `MegatronModel`, and only its methods are called.
        self._workers = cast("WorkerGroup[MegatronTrainer]", started)
        descriptions = self._workers.call_all(MegatronModel.describe, load_config_json(str(source.folder())))
        first = descriptions[0]
        self._coordinates = [description.coordinates for description in descriptions]
        self._data_parallel_size = first.coordinates.data_parallel_size
        megatron = policy.megatron_cfg
        # An interleaved schedule runs groups of microbatches, with one microbatch for each stage.
        interleaved = megatron.virtual_pipeline_model_parallel_size is not None
        self._microbatch_multiple = megatron.pipeline_model_parallel_size if interleaved else 1
        self._cluster = cluster
        self._images = ArrayStore(ray.put)
        self._forward_flops, self._gpus = first.forward_flops, [description.gpu for description in descriptions]
        self.moe_configuration = first.moe_configuration
        self.moe_configuration_sources = first.moe_configuration_sources
        self.notices = first.notices

    def evaluate(self, batch: TokenBatch, loss_function: LossFunction) -> dict[str, MetricSeries]:
        """Return the loss function's metrics from forward passes only. Batches of any size are allowed."""
        self._require_heads(loss_function)
        plan, filled = self._plan_forward(batch, self._batching)
        shards = make_shards(filled, plan.by_rank, batch)
        by_rank = self._workers.start_each(MegatronModel.evaluate, self._to_ranks(shards, loss_function))()
        return join_metrics(list(by_rank.values()))

    def logprobs(self, batch: TokenBatch) -> Tensor:
        """Return the log-probability of each token given its prefix, in nats, `[batch, sequence]`."""
        return self.start_logprobs(batch)()

    def start_logprobs(
        self, batch: TokenBatch, *, by_one_copy: bool = False, reference: bool = False
    ) -> Callable[[], Tensor]:
        """Start `logprobs` after the workers' pending calls. Return a function that waits for the result.

        Args:
            by_one_copy: Whether to use only the ranks of one data-parallel copy, if the copy has all experts. For few
                sequences this saves work, because their number hardly changes the cost of a rank's pass.
            reference: Whether to use the reference model, which must have been kept.
        """
        alone = by_one_copy and _has_its_own_experts(self._policy.megatron_cfg)
        plan, filled, shares = self._plan_logprobs(batch, self._logprob_batching, 1 if alone else None)
        measure = MegatronTrainer.reference_logprobs if reference else MegatronModel.logprobs
        started = self._workers.start_each(measure, self._to_ranks(shares))
        return lambda: in_rows(plan, self._reported(started()), batch, filled)

    def score_norms(self, batch: TokenBatch) -> Tensor:
        """Return the squared norm of the gradient of each token's log-probability by the logits, `[batch, sequence]`.

        It is 0 for the first token and on padding.
        """
        return self._start(token_score_norms, batch)()

    def values(self, batch: TokenBatch) -> Tensor:
        """Return the value of the state in which each token is chosen, `[batch, sequence]`.

        The value is 0 for the first token and on padding.
        """
        self._require_head(Head.VALUE)
        return self._start(prefix_values, batch)()

    def scores(self, batch: TokenBatch) -> Tensor:
        """Return the score of each sequence, `[batch]`: the value head's output at its last token."""
        self._require_head(Head.SCORE)
        return self._start(sequence_scores, batch)()[:, 0]

    def start_candidate_logprobs(self, batch: TokenBatch) -> Callable[[], Tensor]:
        """Begin to compute the log-probabilities of each token's candidates (column `candidate_ids`).

        The returned function waits for the log-probabilities and returns them, `[batch, sequence, k]`.
        """
        return self._start(candidate_logprobs, batch)

    def start_top_candidates(self, batch: TokenBatch, k: int, vocabulary_size: int) -> Callable[[], Candidates]:
        """Begin to find the `k` likeliest tokens at each position. Return a function that waits for them.

        Only tokens with an id below `vocabulary_size` count.
        """
        plan, filled, shares = self._plan_logprobs(batch, self._logprob_batching)
        measurement = partial(top_candidates, k=k, vocabulary_size=vocabulary_size)
        started = self._workers.start_each(MegatronModel.measure, self._to_ranks(shares, measurement))

        def wait() -> Candidates:
            by_rank = self._reported(started())
            ids, logprobs = ([[found[part] for found in of_rank] for of_rank in by_rank] for part in (0, 1))
            return Candidates(in_rows(plan, ids, batch, filled), in_rows(plan, logprobs, batch, filled))

        return wait

    def _start(self, measurement: Measurement[Tensor], batch: TokenBatch) -> Callable[[], Tensor]:
        """Start a measurement after the workers' pending calls. Return a function that waits for `[batch, sequence,
        ...]`."""
        plan, filled, shares = self._plan_logprobs(batch, self._logprob_batching)
        started = self._workers.start_each(MegatronModel.measure, self._to_ranks(shares, measurement))
        return lambda: in_rows(plan, self._reported(started()), batch, filled)

    def compare_routes(
        self, batch: TokenBatch, *, reference: bool = False, one_at_a_time: bool = False
    ) -> RouteComparison:
        """Compare the experts that routers choose with the batch's captured routes, and return the comparison.

        The captured routes are not replayed.
        """
        batching = PlainBatching(1) if one_at_a_time else self._logprob_batching
        plan, filled, shares = self._plan_logprobs(batch, batching)
        compare = MegatronTrainer.compare_reference_routes if reference else MegatronModel.compare_routes
        by_rank = self._reported(self._workers.start_each(compare, self._to_ranks(shares))())
        logprobs = in_rows(plan, [found for found, _ in by_rank], batch, filled)
        return RouteComparison(logprobs, by_rank[0][1])

    def _require_head(self, head: Head) -> None:
        if head not in self._heads:
            raise ValueError(f"the model of role {self._role} was not started with the head {head.name}")

    def _require_heads(self, loss_function: LossFunction) -> None:
        if missing := missing_heads(loss_function, self._heads):
            names = ", ".join(sorted(head.name for head in missing))
            raise ValueError(f"the loss needs {names}, which the model of role {self._role} was not started with")

    def shutdown(self) -> None:
        """Stop all workers."""
        self._workers.shutdown()

    def _plan_forward(
        self, batch: TokenBatch, batching: Batching, num_copies: int | None = None
    ) -> tuple[EvaluationPlan, TokenBatch]:
        """Return the microbatches of `num_copies` data-parallel ranks (default: all), and the batch with filler rows.

        Filler rows repeat sequences, so that all ranks have the same number of microbatches. Their results do not
        count.
        """
        batch, shared = self._sharing(batch.with_shared_in(self._images))
        plan = plan_evaluation(
            batch.lengths.tolist(),
            num_data_parallel_ranks=num_copies or self._data_parallel_size,
            batching=batching,
            microbatch_multiple=self._microbatch_multiple,
            group_size=batch.group_size,
            images=image_patches(batch, self._num_patches),
            shared=shared,
        )
        return plan, append_fillers(batch, plan.fillers)

    def _sharing(self, batch: TokenBatch) -> tuple[TokenBatch, list[int]]:
        """Decide whether the batch shares prefixes. Return it with this choice, and `shared` of `plan_microbatches`."""
        if self._policy.shared_prefix is False:
            return batch, []
        shared = shared_with_previous(batch)
        if self._policy.shared_prefix == "auto" and sum(shared) < LEAST_SAVED * int(batch.lengths.sum()):
            return batch, []
        return replace(batch, shares_prefixes=True), shared

    def _plan_logprobs(
        self, batch: TokenBatch, batching: Batching, num_copies: int | None = None
    ) -> tuple[EvaluationPlan, TokenBatch, list[list[TokenBatch]]]:
        """Return the plan of a log-probability pass, the batch with fillers, and each rank's microbatches."""
        inputs = batch.for_model()
        if isinstance(batching, PlainBatching):
            # Fillers cost as much as sequences, so the microbatches of few sequences (as in the refit check) are small.
            num_shares = (num_copies or self._data_parallel_size) * self._microbatch_multiple
            fitting = -(-len(batch) // batch.group_size // num_shares)
            batching = PlainBatching(min(batching.micro_batch_size, fitting))
        plan, filled = self._plan_forward(inputs, batching, num_copies)
        return plan, filled, [[filled.select(indices) for indices in microbatches] for microbatches in plan.by_rank]

    def _to_ranks(self, shares: Sequence[Share], *further: *Further) -> Sequence[tuple[Share, *Further] | None]:
        """Return each worker's arguments: the part (`shares`) for its data-parallel rank, and `further`.

        If there are fewer parts than data-parallel ranks, the last ranks get None.
        """
        ranks = [place.data_parallel_rank for place in self._coordinates]
        return [(shares[rank], *further) if rank < len(shares) else None for rank in ranks]

    def _reported(self, by_rank: Mapping[int, Result]) -> list[Result]:
        """Return a result for each data-parallel rank that was called, from the worker that computes its loss."""
        places = [(self._coordinates[rank], result) for rank, result in by_rank.items()]
        reported = {place.data_parallel_rank: result for place, result in places if place.reports_loss}
        return [reported[rank] for rank in sorted(reported)]


def _environment(policy: PolicyConfig, *, on_gpus: bool) -> dict[str, str]:
    """Return the environment variables of the workers: the layout's (on GPUs only) and the user's."""
    megatron = policy.megatron_cfg
    # A single queue to the GPU starts overlapping kernels in call order. Megatron-Core requires this if tensor-parallel
    # or context-parallel ranks communicate while they compute.
    talk = megatron.tensor_model_parallel_size * megatron.context_parallel_size > 1
    by_layout = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if on_gpus and talk else {}
    return by_layout | megatron.env_vars


def _has_its_own_experts(megatron: MegatronConfig) -> bool:
    """Return whether each data-parallel copy holds all experts on its own ranks."""
    # Megatron-Core numbers the ranks of a stage consecutively, and distributes the experts over neighbouring ranks.
    ranks_of_a_stage = megatron.tensor_model_parallel_size * megatron.context_parallel_size
    ranks_of_experts = megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size
    return ranks_of_a_stage % ranks_of_experts == 0


def in_rows(plan: EvaluationPlan, by_rank: Sequence[Sequence[Tensor]], batch: TokenBatch, filled: TokenBatch) -> Tensor:
    """Return the values of all ranks' microbatches as `[batch, sequence, ...]`, 0 on padding, without filler rows."""
    first = by_rank[0][0]
    result = first.new_zeros((*filled.input_ids.shape, *first.shape[2:]))
    for microbatches, found in zip(plan.by_rank, by_rank, strict=True):
        for indices, values in zip(microbatches, found, strict=True):
            result[list(indices), : values.shape[1]] = values
    is_token = torch.arange(result.shape[1]) < batch.lengths[:, None]
    return result[: len(batch)].where(is_token.view(*is_token.shape, *(1 for _ in first.shape[2:])), 0)


def join_metrics(by_rank: list[dict[str, MetricSeries]]) -> dict[str, MetricSeries]:
    """Return the concatenated metrics of all ranks that report any metrics."""
    reporting = [metrics for metrics in by_rank if metrics]
    return {name: concatenate(metrics[name] for metrics in reporting) for name in reporting[0]}
