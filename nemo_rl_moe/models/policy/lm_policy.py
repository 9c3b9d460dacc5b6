# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver's side of the policy: shards each batch over the data-parallel ranks and calls the workers."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from torch import Tensor

from nemo_rl_moe.config.schema import MasterConfig
from nemo_rl_moe.config.schema_grpo import generating
from nemo_rl_moe.config.schema_policy import MegatronConfig, PolicyConfig, sequence_multiple
from nemo_rl_moe.distributed.accelerators import peak_flops_per_second
from nemo_rl_moe.distributed.batch import (
    GlobalBatchShard,
    StoredColumn,
    TokenBatch,
    append_fillers,
    make_shards,
    stored_per_token,
)
from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.distributed.microbatches import (
    Batching,
    DynamicBatching,
    EvaluationPlan,
    PackedBatching,
    PlainBatching,
    plan_evaluation,
    plan_microbatches,
)
from nemo_rl_moe.distributed.shared_arrays import ArrayStore
from nemo_rl_moe.distributed.stored_rows import StoredRows
from nemo_rl_moe.distributed.worker_group import WorkerGroup
from nemo_rl_moe.errors import CheckpointSaveError, ConfigurationError, WeightSyncError
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationBatch
from nemo_rl_moe.metrics import MetricSeries, PhaseClock, concatenate
from nemo_rl_moe.models.families import family_of, num_patches_of
from nemo_rl_moe.models.hf_files import ModelSource, load_hf_config, plain_config
from nemo_rl_moe.models.images import distinct_sizes, picture_patches
from nemo_rl_moe.models.interfaces import (
    EvaluationResult,
    GpuUse,
    LossFunction,
    RouteComparison,
    TrainResult,
    WriteOutcome,
)
from nemo_rl_moe.models.policy.megatron_policy_worker import (
    MegatronPolicyWorker,
    SendOutcome,
    WeightsOutcome,
    WorkerDescription,
)
from nemo_rl_moe.moe.replay import UNKNOWN
from nemo_rl_moe.weight_sync.carriers import Carrier, make_carrier
from nemo_rl_moe.weight_sync.folder import FolderTransport, folder_of_one_machine
from nemo_rl_moe.weight_sync.transport import TransportSpec

if TYPE_CHECKING:
    from nemo_rl_moe.models.megatron.training.trainer import RankTrainResult


POLICY_ROLE = "policy"


def choose_batching(policy: PolicyConfig, micro_batch_size: int) -> Batching:
    """Batching of a policy: by tokens where the configuration says so, otherwise of this many sequences."""
    if policy.sequence_packing.enabled:
        multiple = sequence_multiple(policy.megatron_cfg.context_parallel_size)
        packing = policy.sequence_packing
        return PackedBatching(packing.train_mb_tokens, multiple, packing.train_mb_patches)
    if policy.dynamic_batching.enabled:
        dynamic = policy.dynamic_batching
        return DynamicBatching(dynamic.train_mb_tokens, dynamic.microbatch_overhead_tokens, dynamic.train_mb_patches)
    return PlainBatching(micro_batch_size)


class ModelWorkers:
    """Megatron-Core workers of one model of a run, one Ray actor a rank: the policy, or a role beside it.

    Without `num_steps` they run forward passes alone and hold neither gradients nor optimizer state.

    Args:
        role: Such as `policy` or `teacher`, for error messages.
        policy: The section that describes the model and its layout.
        cluster: A started cluster with a place for every rank.
        source: Where the model is read from, of `find_model`.
        seed: Seed of dropout.
        num_steps: Optimizer steps of the whole run; None: forward passes alone.
        keep_reference: Keep the first weights as the reference model.

    Attributes:
        moe_configuration: The router and expert settings that are really in force.
        moe_configuration_sources: Who has set each of them.
        notices: What a user should know of the weights that were read, a line each.

    Raises:
        ConfigurationError: The model or its weights cannot be used.
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
    ):
        self._policy = policy
        self._batching = choose_batching(policy, policy.train_micro_batch_size)
        generates = generating(policy)
        self._logprob_batching = choose_batching(policy, generates.logprob_batch_size) if generates else self._batching
        self._max_generation_batch_size = generates.generation.max_batch_size if generates else None
        self._hf_config = load_hf_config(str(source.folder()))
        self._num_patches = num_patches_of(self._hf_config)
        self._workers = WorkerGroup(
            cluster,
            MegatronPolicyWorker,
            {
                "policy": policy,
                "source": source,
                "hf_config": plain_config(self._hf_config),
                "seed": seed,
                "num_steps": num_steps,
                "keep_reference": keep_reference,
                "decodes_text": generates is not None and bool(generates.generation.stop_strings),
            },
            start_timeout_s=cluster.config.worker_start_timeout_s,
            call_timeout_s=cluster.config.worker_call_timeout_s,
            environment=_environment(policy, on_gpus=cluster.config.gpus_per_node > 0),
        )
        descriptions: list[WorkerDescription] = self._workers.call_all("describe")
        if problems := _problems_of_ranks(descriptions):
            self._workers.shutdown()
            whose = "" if role == POLICY_ROLE else f"role {role}: "
            raise ConfigurationError([f"{whose}{problem}" for problem in problems])
        first = descriptions[0]
        self._coordinates = [description.coordinates for description in descriptions]
        self._data_parallel_size: int = self._coordinates[0].data_parallel_size
        megatron = policy.megatron_cfg
        # An interleaved schedule runs microbatches in groups of as many as there are stages.
        interleaved = megatron.virtual_pipeline_model_parallel_size is not None
        self._microbatch_multiple = megatron.pipeline_model_parallel_size if interleaved else 1
        self._cluster = cluster
        self._pictures = ArrayStore(ray.put)
        self._forward_flops, self._gpus = first.forward_flops, [description.gpu for description in descriptions]
        self.moe_configuration = first.moe_configuration
        self.moe_configuration_sources = first.moe_configuration_sources
        self.notices = first.notices

    def evaluate(self, batch: TokenBatch, loss_function: LossFunction) -> EvaluationResult:
        """Forward passes only; the batch need not be divisible over the ranks."""
        plan, filled = self._plan_forward(batch, self._batching)
        shards = make_shards(filled, plan.by_rank, batch)
        return EvaluationResult(microbatch_metrics=_join(self._call("evaluate", shards, loss_function)))

    def logprobs(self, batch: TokenBatch) -> Tensor:
        """Log-probability of each token given those before it, `[batch, sequence]`."""
        return self.start_logprobs(batch)()

    def start_logprobs(self, batch: TokenBatch, *, by_one_copy: bool = False) -> Callable[[], Tensor]:
        """As `logprobs`, asked for now, after what the workers do already; what it returns waits for them.

        Args:
            batch: The sequences.
            by_one_copy: The ranks of one copy of the model do it alone, where its experts lie on no others: a pass over
                a few sequences costs each rank much the same, however few they are.
        """
        alone = by_one_copy and _has_its_own_experts(self._policy.megatron_cfg)
        return self._start_logprobs(batch, reference=False, num_copies=1 if alone else None)

    def shutdown(self) -> None:
        """Stops every worker."""
        self._workers.shutdown()

    def _plan_forward(
        self, batch: TokenBatch, batching: Batching, num_copies: int | None = None
    ) -> tuple[EvaluationPlan, TokenBatch]:
        """Plan of the ranks' microbatches, and the batch with the fillers that its indices may refer to.

        Args:
            batch: The sequences.
            batching: Sizes of microbatches.
            num_copies: Data-parallel ranks that get some; None: all of them.
        """
        batch = batch.with_shared_in(self._pictures)
        plan = plan_evaluation(
            batch.lengths.tolist(),
            num_data_parallel_ranks=num_copies or self._data_parallel_size,
            batching=batching,
            microbatch_multiple=self._microbatch_multiple,
            group_size=batch.group_size,
            pictures=picture_patches(batch, self._num_patches),
        )
        return plan, append_fillers(batch, plan.fillers)

    def _start_logprobs(
        self, batch: TokenBatch, reference: bool, num_copies: int | None = None
    ) -> Callable[[], Tensor]:
        plan, filled, shares = self._plan_logprobs(batch, self._logprob_batching, num_copies)
        by_rank = self._start_reporting("logprobs", shares, reference)
        return lambda: _in_rows(plan, by_rank(), batch, filled)

    def _plan_logprobs(
        self, batch: TokenBatch, batching: Batching, num_copies: int | None = None
    ) -> tuple[EvaluationPlan, TokenBatch, list[list[TokenBatch]]]:
        """Plan of a log-probability pass, the batch with fillers, and each rank's microbatches of it.

        Args:
            batch: The sequences.
            batching: Sizes of microbatches.
            num_copies: As of `_plan_forward`.
        """
        # The workers need the tokens, and what else the model reads.
        inputs = batch.for_model()
        if isinstance(batching, PlainBatching):
            # Fillers cost what sequences cost: microbatches of a few sequences, such as the refit check's, are small.
            num_shares = (num_copies or self._data_parallel_size) * self._microbatch_multiple
            fitting = -(-len(batch) // batch.group_size // num_shares)
            batching = PlainBatching(min(batching.micro_batch_size, fitting))
        plan, filled = self._plan_forward(inputs, batching, num_copies)
        return plan, filled, [[filled.select(indices) for indices in microbatches] for microbatches in plan.by_rank]

    def _start(self, method: str, by_data_parallel_rank: Sequence[Any], argument: Any) -> Callable[[], list[Any]]:
        """Calls every worker with its share of the batch; pipeline, tensor and context ranks of one share all get that.

        Where there are fewer shares than data-parallel ranks, the last of those are not called.
        """
        num_shares = len(by_data_parallel_rank)
        ranks = [place.data_parallel_rank for place in self._coordinates]
        return self._workers.start_each(
            method, [(by_data_parallel_rank[rank], argument) if rank < num_shares else None for rank in ranks]
        )

    def _call(self, method: str, by_data_parallel_rank: Sequence[Any], argument: Any) -> list[Any]:
        """As `_start`; the results."""
        return self._start(method, by_data_parallel_rank, argument)()

    def _start_reporting(
        self, method: str, by_data_parallel_rank: Sequence[Any], argument: Any
    ) -> Callable[[], list[Any]]:
        """As `_start`; one result for each data-parallel rank, from the worker that computes its loss."""
        wait = self._start(method, by_data_parallel_rank, argument)

        def results() -> list[Any]:
            places = zip(self._coordinates, wait(), strict=True)
            by_rank = {place.data_parallel_rank: result for place, result in places if place.reports_loss}
            return [by_rank[rank] for rank in range(len(by_data_parallel_rank))]

        return results

    def _call_reporting(self, method: str, by_data_parallel_rank: Sequence[Any], argument: Any) -> list[Any]:
        """As `_start_reporting`; the results."""
        return self._start_reporting(method, by_data_parallel_rank, argument)()


class MegatronPolicy(ModelWorkers):
    """The policy of a run: the workers that train it, and keep the reference weights where the algorithm needs them.

    Args:
        config: The whole configuration.
        cluster: A started cluster with a place for every rank.
        seed: Seed of dropout.
        num_steps: Optimizer steps of the whole run; None: it generates and is measured, and is not trained.
        source: Where the model is read from, of `find_model`.
        model_files: What lies beside weights that are saved, file name to content; without a `config.json` nobody can
            load them.
        keep_reference: Keep the first weights as the reference model.

    Attributes:
        model_files: As given.
        weight_version: Optimizer steps that changed the weights since the start of training.

    Raises:
        ConfigurationError: The model or its weights cannot be used.
    """

    def __init__(
        self,
        config: MasterConfig,
        cluster: RayCluster,
        *,
        seed: int,
        num_steps: int | None,
        source: ModelSource,
        model_files: Mapping[str, bytes],
        keep_reference: bool = False,
    ):
        super().__init__(
            POLICY_ROLE,
            config.policy,
            cluster,
            source=source,
            seed=seed,
            num_steps=num_steps,
            keep_reference=keep_reference,
        )
        self._checkpoint_dir = config.checkpointing.checkpoint_dir
        self.model_files = model_files
        self.weight_version = 0
        self._trains, self._is_offloaded = num_steps is not None, False
        generates = generating(config.policy)
        self._weight_transport = "files" if generates is None else generates.generation.weight_transport
        self._num_failed_transfers = 0

    def train(self, batch: TokenBatch, loss_function: LossFunction) -> TrainResult:
        """One optimizer step for each global batch in `batch`."""
        size = self._policy.train_global_batch_size
        batch = batch.with_shared_in(self._pictures)
        plan = plan_microbatches(
            batch.lengths.tolist(),
            num_data_parallel_ranks=self._data_parallel_size,
            global_batch_size=size,
            batching=self._batching,
            microbatch_multiple=self._microbatch_multiple,
            group_size=batch.group_size,
            pictures=picture_patches(batch, self._num_patches),
        )
        rows = size * batch.group_size
        global_batches = [batch.select(range(start, start + rows)) for start in range(0, len(batch), rows)]
        by_global_batch = [
            make_shards(batch, by_rank, whole)
            for by_rank, whole in zip(plan.global_batches, global_batches, strict=True)
        ]
        shards = [list(of_rank) for of_rank in zip(*by_global_batch, strict=True)]
        results: list[RankTrainResult] = self._call("train", shards, loss_function)
        self._is_offloaded = False  # ranks have it back where nobody asked before
        first = results[0]
        self.weight_version = first.weight_version
        return TrainResult(
            global_loss=first.global_loss,
            grad_norm=first.grad_norm,
            lr=first.lr,
            num_microbatches=first.num_microbatches,
            num_tokens=int(batch.lengths.sum()),
            microbatch_metrics=_join([result.microbatch_metrics for result in results]),
            moe_metrics=first.moe_metrics,
            expert_load=first.expert_load,
            num_updates=len(global_batches),
            num_skipped_updates=first.num_skipped_updates,
            skipped_in_a_row=first.skipped_in_a_row,
            weight_version=first.weight_version,
            tape_report=first.tape_report,
            advantage_scores=first.advantage_scores,
            gpu_use=self._gpu_use(batch, by_global_batch, results),
        )

    def _gpu_use(
        self,
        batch: TokenBatch,
        by_global_batch: Sequence[Sequence[GlobalBatchShard]],
        results: Sequence["RankTrainResult"],
    ) -> GpuUse | None:
        """Use of the GPUs in a `train` call; None on CPUs."""
        names = [name for name in self._gpus if name is not None]
        if self._forward_flops is None or not names:
            return None
        # What a card can do in other formats is another number.
        in_bfloat16 = self._policy.precision == "bfloat16"
        return GpuUse(
            num_gpus=len(names),
            num_gpus_of_run=self._cluster.config.num_gpus,
            train_flops=self._forward_flops.training(batch.lengths.tolist()) + self._tower_flops(by_global_batch),
            peak_flops_per_second=peak_flops_per_second(names) if in_bfloat16 else None,
            memory=_join([result.memory for result in results]),
        )

    def _tower_flops(self, by_global_batch: Sequence[Sequence[GlobalBatchShard]]) -> int:
        """Operations of the vision tower: on the distinct pictures of each microbatch, once for all its ranks."""
        vision = family_of(self._hf_config).vision
        if vision is None:
            return 0
        grids = [
            vision.patch_grid(self._hf_config, *size)
            for shards in by_global_batch
            for shard in shards
            for microbatch in shard.microbatches
            for size in distinct_sizes(microbatch)
        ]
        return vision.shape(self._hf_config).training_flops(grids, self._policy.freeze)

    def prepare_for_generation(self, clock: PhaseClock) -> None:
        """Moves the optimizer's state to the host, and frees gradients, where the configuration says so."""
        generates = generating(self._policy)
        self._offload_optimizer(generates is not None and generates.offload_optimizer_for_generation, clock)

    def prepare_for_logprobs(self, clock: PhaseClock) -> None:
        """The same before log-probability passes."""
        generates = generating(self._policy)
        self._offload_optimizer(generates is not None and generates.offload_optimizer_for_logprob, clock)

    def prepare_for_training(self, clock: PhaseClock) -> None:
        """Moves it back, where it was moved."""
        if self._is_offloaded:
            with clock.phase("onload_optimizer"):
                self._workers.call_all("onload_optimizer")
            self._is_offloaded = False

    def _offload_optimizer(self, is_wanted: bool, clock: PhaseClock) -> None:
        if is_wanted and self._trains and not self._is_offloaded:
            with clock.phase("offload_optimizer"):
                self._workers.call_all("offload_optimizer")
            self._is_offloaded = True

    def reference_logprobs(self, batch: TokenBatch) -> Tensor:
        """The same of the model at the start of the run."""
        return self._start_logprobs(batch, reference=True)()

    def logprobs_and_routes(
        self, batch: TokenBatch, *, one_at_a_time: bool = False
    ) -> tuple[Tensor, StoredColumn | None]:
        """`logprobs`, and the routed experts of the pass, in Ray's object store; None of a model without MoE layers."""
        if not self.moe_configuration:
            return self.logprobs(batch), None
        batching = PlainBatching(1) if one_at_a_time else self._logprob_batching
        plan, filled, shares = self._plan_logprobs(batch, batching)
        by_rank = self._call_reporting("logprobs_and_routes", shares, None)
        rows: list[StoredRows | None] = [None] * len(filled)
        for microbatches, (_, routes) in zip(plan.by_rank, by_rank, strict=True):
            places = [index for indices in microbatches for index in indices]
            for place, of_sequence in zip(places, routes, strict=True):
                rows[place] = of_sequence
        logprobs = _in_rows(plan, [found for found, _ in by_rank], batch, filled)
        return logprobs, stored_per_token(rows[: len(batch)], fill=UNKNOWN)

    def compare_routes(
        self, batch: TokenBatch, *, reference: bool = False, one_at_a_time: bool = False
    ) -> RouteComparison:
        """The experts that routers choose against those of the batch's tape, which is not replayed."""
        batching = PlainBatching(1) if one_at_a_time else self._logprob_batching
        plan, filled, shares = self._plan_logprobs(batch, batching)
        by_rank = self._call_reporting("compare_routes", shares, reference)
        logprobs = _in_rows(plan, [found for found, _ in by_rank], batch, filled)
        return RouteComparison(logprobs, by_rank[0][1])

    def generate(self, batch: GenerationBatch) -> list[GeneratedSequence]:
        """One continuation of each prompt, in the order of the prompts."""
        size = self._data_parallel_size
        batch = batch.with_shared_in(self._pictures)
        # Neighbours are often answers to one prompt, and alike in length: deal them out.
        shares = [batch.share(rank, size) for rank in range(size)]
        by_rank = self._call_reporting("generate", shares, self._max_generation_batch_size)
        sequences: list[Any] = [None] * len(batch.prompts)
        for rank, found in enumerate(by_rank):
            sequences[rank::size] = found
        return sequences

    def weight_transport(self, *, altered: bool = False, then: Callable[[], object] = lambda: None) -> FolderTransport:
        """A transport of the weights as they are now, to be opened for one engine: a context manager.

        Args:
            altered: Send others in their place, of which every tensor differs.
            then: Called when all ranks have been asked to send: what it asks of them, they do next.

        Raises:
            ConfigurationError: The run has several machines and no folder that all of them reach.
        """
        send = partial(self._send_weights, altered, then)
        return FolderTransport(self._transfer_folder(), len(self._coordinates), send, make_carrier=self._carrier)

    def save_weights(self, directory: Path) -> Sequence[str]:
        """Writes the weights as a Hugging Face folder; it appears whole or not at all.

        Returns:
            Names of parameters that were left out because the family has no tensor for them.

        Raises:
            CheckpointSaveError: A rank could not write its part.
        """
        outcomes: list[WeightsOutcome] = self._workers.call_all("save_weights", directory.absolute(), self.model_files)
        if problems := [outcome.problem for outcome in outcomes if outcome.problem is not None]:
            raise CheckpointSaveError(problems[0])
        return outcomes[0].left_out

    def start_checkpoint(self, directory: Path, *, with_optimizer: bool) -> None:
        """Takes a snapshot of the training state and begins to write it; training may go on at once."""
        self._workers.call_all("start_checkpoint", directory.absolute(), with_optimizer)

    def poll_checkpoint(self, *, wait: bool) -> WriteOutcome | None:
        """Outcome of the writing; None while it goes on."""
        if wait or all(self._workers.call_all("checkpoint_is_written")):
            return WriteOutcome(self._workers.call_all("finish_checkpoint")[0])
        return None

    def load_checkpoint(self, directory: Path, *, with_optimizer: bool) -> None:
        """Puts back what `start_checkpoint` wrote.

        Raises:
            DamagedCheckpointError: Its files are not what was written; another checkpoint must be loaded before a step.
            CheckpointError: It holds anything but tensors, or belongs to another model.
        """
        problems = self._workers.call_all("load_checkpoint", directory.absolute(), with_optimizer)
        for problem in filter(None, problems):
            raise problem
        self.weight_version = self._workers.call_all("weight_version")[0]

    def _transfer_folder(self) -> Path:
        if self._cluster.is_local:
            return folder_of_one_machine(len(self._coordinates))
        if self._checkpoint_dir is None:
            raise ConfigurationError(
                "checkpointing.checkpoint_dir: null, but weights travel to the generation engine through a folder that"
                " all machines reach, and that one is taken; set it"
            )
        return Path(self._checkpoint_dir).absolute()

    def _carrier(self, num_receivers: int, receivers: str) -> Carrier:
        """The configured way of the weights; after a failure with connections of its own."""
        group = f"{receivers}-{self._num_failed_transfers}"
        address = "127.0.0.1" if self._cluster.is_local else None
        return make_carrier(self._weight_transport, group, num_receivers, address)

    def _send_weights(self, altered: bool, then: Callable[[], object], transfer: TransportSpec) -> int:
        sending = self._workers.start_each("send_weights", [(transfer, altered)] * len(self._coordinates))
        then()
        outcomes: list[SendOutcome] = sending()
        if problems := [outcome.problem for outcome in outcomes if outcome.problem is not None]:
            self._num_failed_transfers += 1
            raise WeightSyncError(problems[0])
        return sum(outcome.num_bytes for outcome in outcomes)


def _environment(policy: PolicyConfig, *, on_gpus: bool) -> dict[str, str]:
    """Environment variables of the workers: what the layout needs on GPUs, then the user's."""
    megatron = policy.megatron_cfg
    # One queue to the GPU, so that what overlaps starts in the order of the calls, as Megatron-Core asks where
    # tensor-parallel or context-parallel ranks talk while they compute.
    talk = megatron.tensor_model_parallel_size * megatron.context_parallel_size > 1
    by_layout = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if on_gpus and talk else {}
    return by_layout | megatron.env_vars


def _has_its_own_experts(megatron: MegatronConfig) -> bool:
    """True where all experts of a data-parallel copy lie on its own ranks: Megatron-Core numbers those of a stage in a
    row, and divides the experts among as many neighbours as it is told to."""
    ranks_of_a_stage = megatron.tensor_model_parallel_size * megatron.context_parallel_size
    ranks_of_experts = megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size
    return ranks_of_a_stage % ranks_of_experts == 0


def _in_rows(
    plan: EvaluationPlan, by_rank: Sequence[Sequence[Tensor]], batch: TokenBatch, filled: TokenBatch
) -> Tensor:
    """Values of all ranks' microbatches as `[batch, sequence]`, 0 on padding; those of fillers are left out."""
    result = torch.zeros(filled.input_ids.shape)
    for microbatches, found in zip(plan.by_rank, by_rank, strict=True):
        for indices, values in zip(microbatches, found, strict=True):
            result[list(indices), : values.shape[1]] = values
    columns = torch.arange(result.shape[1])
    return result[: len(batch)].where(columns < batch.lengths[:, None], 0.0)


def _problems_of_ranks(descriptions: Sequence[WorkerDescription]) -> list[str]:
    """The problems of the first rank that has any, with its number where others have none."""
    ranks = [rank for rank, description in enumerate(descriptions) if description.problems]
    if not ranks:
        return []
    where = f" (on rank {ranks[0]})" if len(ranks) < len(descriptions) else ""
    return [f"{problem}{where}" for problem in descriptions[ranks[0]].problems]


def _join(by_rank: list[dict[str, MetricSeries]]) -> dict[str, MetricSeries]:
    reporting = [metrics for metrics in by_rank if metrics]
    return {name: concatenate(metrics[name] for metrics in reporting) for name in reporting[0]}
