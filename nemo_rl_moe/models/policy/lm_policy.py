# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver's side of a trainable model, and of the policy, which also generates and sends its weights."""

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from jaxtyping import Float
from ray.util import get_node_ip_address
from torch import Tensor

from nemo_rl_moe.config.schema import MasterConfig, engines_share_gpus
from nemo_rl_moe.config.schema_grpo import generating
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.config.schema_run import POLICY_ROLE
from nemo_rl_moe.distributed.accelerators import peak_flops_per_second
from nemo_rl_moe.distributed.batch import (
    GlobalBatchShard,
    StoredColumn,
    TokenBatch,
    make_shards,
    stored_per_token,
    with_empty_rows,
)
from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.distributed.microbatches import PlainBatching, plan_microbatches
from nemo_rl_moe.distributed.shared_gpu import OwnGpu, SharedGpu
from nemo_rl_moe.distributed.stored_rows import StoredRows
from nemo_rl_moe.errors import CheckpointError, CheckpointSaveError, ConfigurationError, WeightSyncError
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationBatch
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.models.families import family_of
from nemo_rl_moe.models.hf_files import ModelSource
from nemo_rl_moe.models.images import distinct_sizes, image_patches
from nemo_rl_moe.models.interfaces import GpuUse, Head, LossFunction, TrainResult
from nemo_rl_moe.models.kept_tensors import KEPT_FOLDER, write_kept
from nemo_rl_moe.models.megatron.training.megatron_model import MegatronModel
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from nemo_rl_moe.models.model_files import write_model_files
from nemo_rl_moe.models.policy.model_workers import ModelWorkers, in_rows, join_metrics
from nemo_rl_moe.models.rank_results import RankTrainResult
from nemo_rl_moe.models.safetensors_folder import SafetensorsFolder
from nemo_rl_moe.routing.replay import UNKNOWN
from nemo_rl_moe.weight_sync.fingerprints import Fingerprints
from nemo_rl_moe.weight_sync.transport import TransportSpec, WeightTransport, folder_of_one_machine
from nemo_rl_moe.weight_sync.transport_backends import TransportBackend, make_backend


class TrainableModel(ModelWorkers):
    """A model with an optimizer, which can be trained, saved, and resumed from a checkpoint.

    Args:
        model_files: Name -> content of each file to save with the weights. Weights can only be loaded with a
            `config.json`.
        kept: Tensors of the model's folder that the workers do not load. Checkpoints contain them.
        heads: The model's heads: log-probabilities, values or both, or scores.

    Attributes:
        weight_version: Number of optimizer steps that have changed the weights since the start of training.
    """

    def __init__(
        self,
        role: str,
        policy: PolicyConfig,
        cluster: RayCluster,
        *,
        source: ModelSource,
        model_files: Mapping[str, bytes],
        kept: SafetensorsFolder | None = None,
        seed: int,
        num_steps: int | None,
        keep_reference: bool = False,
        heads: Collection[Head] = (Head.LOGPROBS,),
    ):
        super().__init__(
            role,
            policy,
            cluster,
            source=source,
            seed=seed,
            num_steps=num_steps,
            keep_reference=keep_reference,
            heads=heads,
        )
        self.model_files, self._kept = model_files, kept
        self.weight_version = 0
        self._trains, self._is_offloaded = num_steps is not None, False

    def train(self, batch: TokenBatch, loss_function: LossFunction) -> TrainResult:
        """Take one optimizer step for each global batch in `batch`, and return the results."""
        self._require_heads(loss_function)
        size = self._policy.train_global_batch_size
        batch, shared = self._sharing(batch.with_shared_in(self._images))
        plan = plan_microbatches(
            batch.lengths.tolist(),
            num_data_parallel_ranks=self._data_parallel_size,
            global_batch_size=size,
            batching=self._batching,
            microbatch_multiple=self._microbatch_multiple,
            group_size=batch.group_size,
            sample_sizes=batch.sample_sizes,
            images=image_patches(batch, self._num_patches),
            shared=shared,
        )
        starts = [*batch.first_rows_of_samples()[::size], len(batch)]
        global_batches = [batch.select(range(start, end)) for start, end in pairwise(starts)]
        filled = with_empty_rows(batch, plan.num_fillers)
        by_global_batch = [
            make_shards(filled, by_rank, whole)
            for by_rank, whole in zip(plan.global_batches, global_batches, strict=True)
        ]
        shards = [list(of_rank) for of_rank in zip(*by_global_batch, strict=True)]
        to_ranks = self._to_ranks(shards, loss_function)
        results = list(self._workers.start_each(MegatronTrainer.train, to_ranks)().values())
        self._is_offloaded = False  # training loads the optimizer state again
        first = results[0]
        self.weight_version = first.weight_version
        return TrainResult(
            global_loss=first.global_loss,
            grad_norm=first.grad_norm,
            lr=first.lr,
            num_microbatches=first.num_microbatches,
            num_tokens=int(batch.lengths.sum()),
            microbatch_metrics=join_metrics([result.microbatch_metrics for result in results]),
            moe_metrics=first.moe_metrics,
            num_updates=first.num_updates,
            num_skipped_updates=first.num_skipped_updates,
            skipped_in_a_row=first.skipped_in_a_row,
            weight_version=first.weight_version,
            artifacts=first.artifacts,
            gpu_use=self._gpu_use(batch, by_global_batch, results),
        )

    def _gpu_use(
        self,
        batch: TokenBatch,
        by_global_batch: Sequence[Sequence[GlobalBatchShard]],
        results: Sequence[RankTrainResult],
    ) -> GpuUse | None:
        """Return the use of GPUs in a `train` call, or None on CPUs."""
        names = [name for name in self._gpus if name is not None]
        if self._forward_flops is None or not names:
            return None
        decoder_flops = self._forward_flops.training(batch.lengths.tolist(), is_frozen=self._policy.lora is not None)
        # The known peaks are for bfloat16.
        in_bfloat16 = self._policy.precision == "bfloat16"
        return GpuUse(
            num_gpus=len(names),
            num_gpus_of_run=self._cluster.config.num_gpus,
            train_flops=decoder_flops + self._tower_flops(by_global_batch),
            peak_flops_per_second=peak_flops_per_second(names) if in_bfloat16 else None,
            memory=join_metrics([result.memory for result in results]),
        )

    def _tower_flops(self, by_global_batch: Sequence[Sequence[GlobalBatchShard]]) -> int:
        """Return the number of operations of the vision tower on the distinct images of each microbatch."""
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
        return vision.shape(self._hf_config).training_flops(grids, self._policy.frozen_parts)

    def save_weights(self, directory: Path) -> Sequence[str]:
        """Write the weights as a Hugging Face folder. The folder appears once it is complete.

        Returns the names of parameters that were omitted because the family has no tensor for them.

        Raises:
            CheckpointSaveError: A rank could not write its part.
        """
        try:
            return self._workers.call_all(MegatronModel.save_weights, directory.absolute(), self.model_files)[0]
        except CheckpointError as error:
            raise CheckpointSaveError(error.problems) from None

    def write_files(self, folder: Path) -> None:
        """Write the files of a checkpoint next to its state, so that it is a model's folder.

        A checkpoint of adapters lacks the kept tensors, as it lacks the other tensors of their base.

        Raises:
            OSError: A file cannot be read or written.
        """
        write_model_files(self.model_files, folder)
        if self._kept is not None and self._policy.lora is None:
            write_kept(self._kept, folder / KEPT_FOLDER)

    def start_checkpoint(self, directory: Path, *, with_optimizer: bool) -> None:
        """Take a snapshot of the training state and begin to write it. Training may continue at once."""
        self._workers.call_all(MegatronTrainer.start_checkpoint, directory.absolute(), with_optimizer)

    def poll_checkpoint(self, *, wait: bool) -> Sequence[str] | None:
        """Return the problems of writing the started checkpoint, or None while the write continues.

        Args:
            wait: Whether to wait for the end of the write.
        """
        if wait or all(self._workers.call_all(MegatronTrainer.checkpoint_is_written)):
            problem = self._workers.call_all(MegatronTrainer.finish_checkpoint)[0]
            return [] if problem is None else [problem]
        return None

    def load_checkpoint(self, directory: Path, *, with_optimizer: bool) -> None:
        """Restore the state that `start_checkpoint` wrote.

        Raises:
            DamagedCheckpointError: Files of the checkpoint have changed. Another checkpoint must be loaded before the
                next step.
            CheckpointError: The checkpoint contains anything but tensors, or belongs to another model.
        """
        versions = self._workers.call_all(MegatronTrainer.load_checkpoint, directory.absolute(), with_optimizer)
        self._is_offloaded = False  # the state was loaded to the device
        self.weight_version = versions[0]

    def _offload_optimizer(self, is_wanted: bool, clock: PhaseClock) -> None:
        if is_wanted and self._trains and not self._is_offloaded:
            with clock.phase("offload_optimizer"):
                self._workers.call_all(MegatronTrainer.offload_optimizer)
            self._is_offloaded = True


class MegatronPolicy(TrainableModel):
    """The policy of a run: a trainable model that also generates, or sends its weights to engines.

    Attributes:
        gpu: Account of the memory of a GPU that the policy's ranks and the engines share. It checks each phase's use.
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
        kept: SafetensorsFolder | None = None,
        keep_reference: bool = False,
        heads: Collection[Head] = (Head.LOGPROBS,),
    ):
        super().__init__(
            POLICY_ROLE,
            config.policy,
            cluster,
            source=source,
            model_files=model_files,
            kept=kept,
            seed=seed,
            num_steps=num_steps,
            keep_reference=keep_reference,
            heads=heads,
        )
        self._checkpoint_dir = config.checkpointing.checkpoint_dir
        generates = generating(config.policy)
        self._weight_transport = "files" if generates is None else generates.generation.weight_transport
        self._num_failed_transfers = 0
        self._frozen_are_sent = False
        self._engines_share_gpus = engines_share_gpus(config)
        moves = generates is not None and generates.offload_optimizer_for_generation
        self.gpu = SharedGpu(moves_training_state=moves) if self._engines_share_gpus else OwnGpu()
        self.gpu.load("when workers start")

    def train(self, batch: TokenBatch, loss_function: LossFunction) -> TrainResult:
        self.gpu.train()
        return super().train(batch, loss_function)

    def load_checkpoint(self, directory: Path, *, with_optimizer: bool) -> None:
        self.gpu.load()
        super().load_checkpoint(directory, with_optimizer=with_optimizer)

    def prepare_for_generation(self, clock: PhaseClock) -> None:
        """Move the optimizer state to the host and free gradients, if the configuration asks for it.

        If engines are on the same GPUs, the ranks also release the memory that their allocators cache.
        """
        generates = generating(self._policy)
        self._offload_optimizer(generates is not None and generates.offload_optimizer_for_generation, clock)
        if self._engines_share_gpus:
            self._workers.call_all(MegatronModel.empty_cache)
        self.gpu.make_room()

    def prepare_for_logprobs(self, clock: PhaseClock) -> None:
        """Move the optimizer state to the host before log-probability passes, if the configuration asks for it."""
        self.gpu.measure()
        generates = generating(self._policy)
        self._offload_optimizer(generates is not None and generates.offload_optimizer_for_logprob, clock)

    def prepare_for_training(self, clock: PhaseClock) -> None:
        """Move the optimizer state back to the device if it is on the host."""
        if self._is_offloaded:
            with clock.phase("onload_optimizer"):
                self._workers.call_all(MegatronTrainer.onload_optimizer)
            self._is_offloaded = False

    def reference_logprobs(self, batch: TokenBatch) -> Tensor:
        """Return `logprobs` of the initial model."""
        return self.start_logprobs(batch, reference=True)()

    def logprobs_and_routes(
        self, batch: TokenBatch, *, one_at_a_time: bool = False
    ) -> tuple[Tensor, StoredColumn | None]:
        """Return `logprobs` and the routed experts of the pass, stored in Ray (None for a model without MoE layers).

        Args:
            one_at_a_time: Whether each microbatch has only one sequence.
        """
        if not self.moe_configuration:
            return self.logprobs(batch), None
        batching = PlainBatching(1) if one_at_a_time else self._logprob_batching
        plan, filled, shares = self._plan_logprobs(batch, batching)
        started = self._workers.start_each(MegatronModel.logprobs_and_routes, self._to_ranks(shares))
        by_rank = self._reported(started())
        rows: list[StoredRows | None] = [None] * len(filled)
        for microbatches, (_, routes) in zip(plan.by_rank, by_rank, strict=True):
            places = [index for indices in microbatches for index in indices]
            for place, of_sequence in zip(places, routes, strict=True):
                rows[place] = of_sequence
        logprobs = in_rows(plan, [found for found, _ in by_rank], batch, filled)
        return logprobs, stored_per_token(rows[: len(batch)], fill=UNKNOWN)

    def expert_biases(self) -> Float[np.ndarray, "2 layers experts"] | None:
        """Return the expert bias before and after the last update. None if the update was skipped or moves no bias."""
        # One rank of each stage is asked. The other ranks of the stage have copies of its layers.
        asked = [
            () if place.data_parallel_rank == place.tensor_rank == place.context_rank == 0 else None
            for place in self._coordinates
        ]
        by_rank = self._workers.start_each(MegatronTrainer.expert_biases, asked)()
        found = {layer: biases for of_stage in by_rank.values() for layer, biases in of_stage.items()}
        return np.stack([found[layer] for layer in sorted(found)], axis=1) if found else None

    def generate(self, batch: GenerationBatch) -> list[GeneratedSequence]:
        """Return one continuation of each prompt, in order."""
        size = self._data_parallel_size
        batch = batch.with_shared_in(self._images)
        # Neighbours go to different ranks, because they are often responses to one prompt, with similar lengths.
        shares = [batch.share(rank, size) for rank in range(size)]
        to_ranks = self._to_ranks(shares, self._max_generation_batch_size)
        by_rank = self._reported(self._workers.start_each(MegatronModel.generate, to_ranks)())
        return [by_rank[number % size][number // size] for number in range(len(batch.prompts))]

    def weight_transport(
        self, *, altered: bool = False, whole: bool = False, then: Callable[[], object] = lambda: None
    ) -> WeightTransport:
        """Return a transport of the current weights to one engine, as a context manager.

        Args:
            altered: Whether to send weights that differ from the policy's in every tensor, for the refit check.
            whole: Whether to send frozen weights too, even if the engine has them.
            then: Called after the ranks have been asked to send. The ranks execute requests of
                `then` after sending.
        """
        send = partial(self._send_weights, altered, then)
        # Over NCCL rank 0 sends for all ranks: each sender would need a communicator with buffers in all receivers.
        num_senders = 1 if self._weight_transport == "nccl" else len(self._coordinates)
        has_files = self._weight_transport == "files"
        return WeightTransport(
            self._transfer_folder() if has_files or self._cluster.is_local else Path(tempfile.gettempdir()),
            num_senders,
            send,
            make_backend=self._backend,
            address=None if has_files or self._cluster.is_local else get_node_ip_address(),
            may_skip_frozen=self._frozen_are_sent and not (altered or whole),
        )

    def start_fingerprints(self, number_format: str) -> Callable[[], Fingerprints]:
        """Begin to compute the fingerprints of the weights on all ranks. Return a function that waits for them."""
        asked = [(number_format,)] * len(self._coordinates)
        by_rank = self._workers.start_each(MegatronModel.weight_fingerprints, asked)
        return lambda: {name: found for of_rank in by_rank().values() for name, found in of_rank.items()}

    def probe_adapters(self, is_on: bool) -> None:
        """Give the adapters other values for a refit check if `is_on` is true. Otherwise restore their own values."""
        self._workers.call_all(MegatronModel.begin_probe if is_on else MegatronModel.end_probe)

    def _transfer_folder(self) -> Path:
        if self._cluster.is_local:
            return folder_of_one_machine(len(self._coordinates))
        if self._checkpoint_dir is None:
            raise ConfigurationError(
                "checkpointing.checkpoint_dir: got null, expected a folder that all machines reach: weights are sent to"
                " the generation engine through this folder"
            )
        return Path(self._checkpoint_dir).absolute()

    def _backend(self, num_receivers: int, receivers: str) -> TransportBackend:
        """Return the configured transport. After a failed transfer it gets new connections."""
        group = f"{receivers}-{self._num_failed_transfers}"
        address = "127.0.0.1" if self._cluster.is_local else None
        return make_backend(self._weight_transport, group, num_receivers, address)

    def _send_weights(self, altered: bool, then: Callable[[], object], transfer: TransportSpec) -> int:
        asked = [(transfer, altered)] * len(self._coordinates)
        sending = self._workers.start_each(MegatronModel.send_weights, asked)
        then()
        self._frozen_are_sent = False
        try:
            num_bytes = sum(sending().values())
            self._frozen_are_sent = self._policy.lora is not None and not altered
            return num_bytes
        except WeightSyncError as error:
            self._num_failed_transfers += 1
            raise WeightSyncError(str(error)) from None  # a sender cannot know that a receiver is lost
